"""The logger of the package."""

from __future__ import annotations

import logging
import sys

from tqdm import tqdm


class _ProgressSafeHandler(logging.Handler):
    """Writes to stderr above a running progress bar, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def get_logger() -> logging.Logger:
    """The logger named ``openppo``; without ``setup_logging`` it obeys the program that imports us."""
    return logging.getLogger("openppo")


def setup_logging(rank: int) -> None:
    """For commands: rank 0 reports from INFO on, the others from WARNING on with their rank in front."""
    logger = get_logger()
    for handler in list(logger.handlers):
        if isinstance(handler, _ProgressSafeHandler):
            logger.removeHandler(handler)
    handler = _ProgressSafeHandler()
    handler.setFormatter(
        logging.Formatter("[openppo] %(message)s" if rank == 0 else f"[openppo rank {rank}] %(message)s")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
