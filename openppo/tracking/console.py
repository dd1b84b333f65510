"""The log, progress bars, and text laid out for a terminal or a log file."""

import logging
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

from openppo import logger
from openppo.tracking.phase import current

WIDTH = 80
"""Columns of tables and lines of metrics in a log file, beside ``[openppo]``."""
WIDEST = 110
"""Most columns of tables and lines of metrics on a terminal."""
SECONDS_BETWEEN_LINES = 30.0
"""Time between two lines of a progress bar in a log file."""
_BAR = "{desc}{percentage:4.0f}% {bar:28} {n_fmt}/{total_fmt}  {elapsed}, {remaining} left"


class _Handler(logging.Handler):
    """Writes to stderr above a running progress bar, with the rank on each line of a file."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        # A full disk or a closed pipe leaves nowhere to report it.
        with suppress(OSError, ValueError):
            write_line(self.format(record), sys.stderr)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message with control characters escaped: it may quote a program, or a service."""
        lines = [escape_control(line) for line in super().format(record).split("\n")]

        if self._rank == 0 and sys.stderr.isatty():
            message = _wrapped(lines, shutil.get_terminal_size().columns)
            if record.levelno >= logging.WARNING:
                return f"\x1b[33mwarning: {message}\x1b[0m"
            return message

        name = "[openppo]" if self._rank == 0 else f"[openppo rank {self._rank}]"
        return "\n".join(f"{name} {line}".rstrip() for line in lines)


def _wrapped(lines: Iterable[str], width: int) -> str:
    """Join ``lines``, broken at blanks where they exceed ``width``; a longer path stays whole."""
    pieces: list[str] = []
    for line in lines:
        if len(line) > width:
            pieces += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        else:
            pieces.append(line)
    return "\n".join(pieces)


def setup_logging(rank: int) -> None:
    """Set up the log of a command: rank 0 from INFO on, other ranks from WARNING on."""
    others = [handler for handler in logger.handlers if not isinstance(handler, _Handler)]
    logger.handlers[:] = others
    logger.addHandler(_Handler(rank))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def write_line(line: str, stream: TextIO) -> None:
    """Write ``line`` above any progress bar; characters outside the stream's encoding become escapes."""
    encoding = stream.encoding or "utf-8"
    tqdm.write(line.encode(encoding, errors="backslashreplace").decode(encoding), file=stream)
    stream.flush()


def escape_control(text: str, longest: int | None = None, keep: str = "start") -> str:
    """Return ``text`` on one line, all that is not printable escaped, so that no terminal obeys it.

    Escaped are control characters, marks of writing direction, and half surrogate pairs. Beyond ``longest`` characters
    only the start or the end is kept, with the number of characters left out.
    """
    left_out = 0 if longest is None else max(0, len(text) - longest)
    kept = text[left_out:] if keep == "end" else text[: len(text) - left_out]
    shown = "".join(map(_printable, kept))

    if not left_out:
        return shown
    if keep == "start":
        return f"{shown} ... (+{left_out} characters)"
    return f"(+{left_out} characters) ... {shown}"


def _printable(character: str) -> str:
    """A blank for a space of any width; other characters as they are, or as an escape."""
    if unicodedata.category(character) == "Zs":
        return " "
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def columns(stream: TextIO) -> int:
    """Return the width of a layout on ``stream``, a terminal or a file."""
    if stream.isatty():
        return min(WIDEST, shutil.get_terminal_size().columns)
    return WIDTH


def table_lines(
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[int] = (),
    indent: int = 0,
    stream: TextIO | None = None,
) -> list[str]:
    """Lay out ``rows`` in aligned columns, two spaces apart; columns ``right`` are right-aligned.

    The last column wraps at the width of ``stream``, stderr by default.
    """
    cells = [list(map(str, row)) for row in rows]
    by_column = zip_longest(*cells, fillvalue="")
    widths = [max(map(disp_len, column)) for column in by_column]
    width_before_last = indent + sum(width + 2 for width in widths[:-1])
    room = max(20, columns(stream or sys.stderr) - width_before_last)

    lines = []
    for row in cells:
        start = " " * indent
        for i, cell in enumerate(row[: len(widths) - 1]):
            blanks = " " * (widths[i] - disp_len(cell))  # East Asian characters are wide
            start += f"{blanks}{cell}  " if i in right else f"{cell}{blanks}  "

        last = row[-1] if len(row) == len(widths) else ""
        for piece in textwrap.wrap(last, room, drop_whitespace=False) or [""]:
            lines.append((start + piece).rstrip())
            start = " " * disp_len(start)
    return lines


def log_lines(lines: Iterable[str]) -> None:
    """Log ``lines`` as one record."""
    logger.info("%s", "\n".join(lines))


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Progress with the time left: iterate over it, or enter it and call ``update``.

    On a terminal it is a tqdm bar that vanishes at the end. In a file it is a line every 30 s, and a last one if it
    ran longer than that. Each update is a sign of progress for the watchdog.
    """

    def __init__(self, items: Iterable[Any], description: str, enabled: bool) -> None:
        total = len(items) if isinstance(items, Sized) else None
        self._items = items
        self._total = total
        self._description = description
        self._lines = enabled and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            desc=f"{description:<10}",  # bars below each other line up
            disable=not enabled or self._lines,
            leave=False,
            dynamic_ncols=True,
            bar_format=_BAR if total else None,
        )
        self.done = 0
        self._start = time.monotonic()
        self._last_line = self._start

    def update(self, n: int = 1, total: int | None = None) -> None:
        """Count ``n`` more as done, of ``total`` if that has changed."""
        self.done += n
        if total is not None:
            self._total = self._bar.total = total
        current.progress()
        self._bar.update(n)
        self._write_line(since=self._last_line)

    def _write_line(self, since: float) -> None:
        now = time.monotonic()
        if not self._lines or now - since < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        elapsed = now - self._start
        line = tqdm.format_meter(
            self.done, self._total or 0, elapsed, ncols=0, prefix=self._description
        )
        with suppress(OSError, ValueError):  # a full disk or a closed pipe ends no training
            print(line.strip(), file=sys.stderr, flush=True)

    def __iter__(self) -> Iterator[Any]:
        with self:
            for item in self._items:
                yield item
                self.update()

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        self._write_line(since=self._start)


def progress_bar(iterable_or_total: Any, description: str, *, enabled: bool) -> ProgressBar:
    """Make a progress bar over an iterable, or over ``range(total)``."""
    items = range(iterable_or_total) if isinstance(iterable_or_total, int) else iterable_or_total
    return ProgressBar(items, description, enabled)
