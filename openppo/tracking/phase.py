"""Where this process is: its innermost phase and its global step, for reports of faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Position:
    """Written by the thread that trains, read by others at any time."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0
        """Global step under way; 0 before the first."""
        self.phases = 0
        """Phases begun and ended so far: the same on ranks that are equally far."""
        self.ticks = 0
        """Signs of progress: phases, and updates of progress bars."""
        self.failing: tuple[BaseException, float] | None = None
        """What ends the run, and when it was raised (``time.monotonic()``), while logs are still being closed."""
        self.on_tick: Callable[[], None] | None = None
        """Called at each update of a progress bar, on the thread that trains."""

    def tick(self) -> None:
        """A progress bar has been updated."""
        self.ticks += 1
        if self.on_tick is not None:
            self.on_tick()


position = Position()
"""Of this process."""


def begin_step(step: int) -> None:
    """Global step ``step``, counted from 1, begins."""
    position.step = step


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The ``with`` block, or the decorated function, is phase ``name``, inside whatever phase there was."""
    outer = position.phase
    _enter(name)
    yield
    _enter(outer)  # not after an exception: the report names the phase in which it was raised


def _enter(name: str) -> None:
    position.phase = name
    position.phases += 1
    position.ticks += 1
