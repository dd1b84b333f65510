"""What people read: tables and texts laid out for a terminal or a log file, with nothing in them that could do harm."""

from __future__ import annotations

import io
import shutil
import sys
import unicodedata
from typing import TextIO

from rich.console import Console, RenderableType
from tqdm import tqdm

from openppo.tracking.log import get_logger

WIDTH = 110
"""Of what is laid out for a log file, and the most on a terminal."""


def harmless(text: str, longest: int | None = None, keep: str = "start") -> str:
    """``text`` on one line: what is not printable as an escape, so that no terminal obeys it; blanks stay.

    That covers control characters, marks that turn the direction of writing, and halves of characters. Of more than
    ``longest`` characters the start or the end is kept, with the number of those left out.
    """
    left_out = 0 if longest is None else max(0, len(text) - longest)
    if left_out:
        text = text[:longest] if keep == "start" else text[left_out:]
    shown = "".join(character if character.isprintable() else _escaped(character) for character in text)
    if not left_out:
        return shown
    return f"{shown} ... (+{left_out} characters)" if keep == "start" else f"(+{left_out} characters) ... {shown}"


def _escaped(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # blanks of other widths
        return " "
    return character.encode("unicode_escape").decode("ascii")


def rendered(table: RenderableType, stream: TextIO, colours: bool = True) -> list[str]:
    """Lines of ``table``, as wide as ``stream`` if that is a terminal, and with its ``colours``."""
    on_terminal = stream.isatty()
    width = min(WIDTH, shutil.get_terminal_size().columns) if on_terminal else WIDTH
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=on_terminal and colours, legacy_windows=False).print(table)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]


def announce(table: RenderableType) -> None:
    """Log ``table`` in one record, with colours where the log is a terminal."""
    plain = rendered(table, sys.stderr, colours=False)
    get_logger().info("%s", "\n".join(plain), extra={"styled": "\n".join(rendered(table, sys.stderr))})


def write_line(line: str, stream: TextIO) -> None:
    """``line`` above any progress bar; what the stream cannot encode becomes an escape."""
    encoding = stream.encoding or "utf-8"
    tqdm.write(line.encode(encoding, errors="backslashreplace").decode(encoding), file=stream)
    stream.flush()
