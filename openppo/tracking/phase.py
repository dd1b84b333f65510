"""The current phase of this process, and the seconds of roles and of phases without a timer."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from openppo.types import Interrupted


class CurrentPhase:
    """The phase and step under way: written by the training thread, read by the watchdog at any time."""

    def __init__(self) -> None:
        self.phase = "starting"
        # The global step under way, from 1; 0 before the first.
        self.step = 0
        # When a phase last began or ended, or a progress bar was updated.
        self.last_progress = time.monotonic()
        # Seconds by role, and by phase without a timer, that no line of metrics has reported yet.
        self.seconds: dict[str, float] = {}
        # Name, and CUDA events at begin and end, of times that are not in ``seconds`` yet.
        self.events: list[tuple[str, Any, Any]] = []

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by name since the last call; waits until the GPU reaches the last event."""
        for name, begin, end in self.events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)

        seconds = self.seconds
        self.seconds = {}
        self.events = []
        return seconds

    def take(self, name: str) -> float:
        """Return the seconds of ``name`` that no line of metrics has reported; other names keep theirs."""
        self.seconds = self.take_seconds()
        return self.seconds.pop(name)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to those of ``name``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def progress(self) -> None:
        """Record the time of this progress."""
        self.last_progress = time.monotonic()

    def begin_step(self, number: int) -> None:
        """Make ``number`` the global step under way."""
        self.step = number

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Name the ``with`` block as the current phase."""
        outer = self.phase
        self.phase = name
        self.progress()

        try:
            yield
        except Interrupted:
            self.phase = outer
            raise

        # After any other exception the name stays: the report names the phase that raised it.
        self.phase = outer
        self.progress()


current = CurrentPhase()
"""The current phase of this process."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the ``with`` block, or the decorated function, as the current phase, and add its time to ``current``."""
    with timed(name), current.named(name):
        yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Add the time of the ``with`` block to ``current``; inside an evaluation only its total is counted.

    On a GPU it is the time between two events in the GPU's queue, so that the CPU does not wait.
    """
    is_counted = name == "evaluation" or current.phase != "evaluation"

    if gpu_in_use():
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        if is_counted:
            current.events.append((name, begin, end))
    else:
        start = time.perf_counter()
        yield
        if is_counted:
            current.add(name, time.perf_counter() - start)


def evaluation(method: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Run a trainer's method as phase "evaluation", and add its seconds to the metrics, if it returns any."""

    @functools.wraps(method)
    def run(trainer: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        with phase("evaluation"):
            metrics = method(trainer, *args, **kwargs)
        seconds = torch.tensor(current.take("evaluation"), dtype=torch.float64)
        if not metrics:
            return metrics

        slowest = trainer.comm.all_reduce(seconds, "max")
        return metrics | {"time/evaluation_s": float(slowest)}

    return run


def gpu_in_use() -> bool:
    """True if this process has begun to use a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()
