"""stub until merged"""

from __future__ import annotations

_signal: str | None = None
_installed = False


def installed() -> bool:
    """True where signals ask for a stop."""
    return _installed


def requested() -> str | None:
    """Name of the signal."""
    return _signal
