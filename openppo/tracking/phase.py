"""Phase, global step and time of the last progress of this process, for reports of faults."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CurrentPhase:
    """Written by the training thread, read by the watchdog at any time."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0
        """Global step under way; 0 before the first."""
        self.last_progress = time.monotonic()
        """When a phase last began or ended, or a progress bar was updated."""
        self.failing: tuple[BaseException, float] | None = None
        """The error that ends the run, and when it was raised, while trackers are being closed."""
        self.on_progress: Callable[[], None] | None = None
        """Called at each progress, on the training thread."""

    def progress(self) -> None:
        """Note progress."""
        self.last_progress = time.monotonic()
        if self.on_progress is not None:
            self.on_progress()


current = CurrentPhase()
"""Of this process."""


def begin_step(step: int) -> None:
    """Note that global step ``step``, counted from 1, begins."""
    current.step = step


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the ``with`` block, or the decorated function, as the current phase."""
    outer = current.phase
    current.phase = name
    current.progress()
    yield
    current.phase = outer  # kept after an exception: the report names the phase in which it was raised
    current.progress()
