"""The logger of the package."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

from tqdm import tqdm

_YELLOW, _PLAIN = "\x1b[33m", "\x1b[0m"


class _ProgressSafeHandler(logging.Handler):
    """Writes to stderr above a running progress bar, not through it.

    On a terminal what rank 0 says stands alone, with its warnings coloured; in a file each line says where it is from.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        encoding = sys.stderr.encoding or "utf-8"
        line = self.format(record).encode(encoding, "backslashreplace").decode(encoding)
        with suppress(OSError, ValueError):  # a full disk or a closed pipe: there is nowhere left to say so
            tqdm.write(line, file=sys.stderr)

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if self._rank == 0 and sys.stderr.isatty():
            coloured = f"{_YELLOW}warning: {message}{_PLAIN}"
            return coloured if record.levelno >= logging.WARNING else record.__dict__.get("styled", message)
        name = "[openppo]" if self._rank == 0 else f"[openppo rank {self._rank}]"
        return "\n".join(f"{name} {line}".rstrip() for line in message.split("\n"))


def get_logger() -> logging.Logger:
    """The logger named ``openppo``; without ``setup_logging`` it obeys the program that imports us."""
    return logging.getLogger("openppo")


def setup_logging(rank: int) -> None:
    """For commands: rank 0 reports from INFO on, the others from WARNING on with their rank in front."""
    logger = get_logger()
    for handler in list(logger.handlers):
        if isinstance(handler, _ProgressSafeHandler):
            logger.removeHandler(handler)
    logger.addHandler(_ProgressSafeHandler(rank))
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
