"""Tables of rich for ``trainer/overview``; goes with it."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from openppo.tracking.console import WIDTH, log_lines
from openppo.tracking.console import escape_control as harmless

__all__ = ["announce", "harmless"]


def announce(table: RenderableType) -> None:
    """Log ``table`` as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, legacy_windows=False).print(table)
    log_lines(line.rstrip() for line in buffer.getvalue().splitlines())
