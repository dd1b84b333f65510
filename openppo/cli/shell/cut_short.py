"""Quiet end of output when its reader leaves: ``--help | head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def may_be_cut_short() -> Iterator[None]:
    """End quietly, with status 0, where nobody reads what is printed inside."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is where a shell has closed it: >&-
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # which Python flushes once more when it ends
        sys.exit(0)
