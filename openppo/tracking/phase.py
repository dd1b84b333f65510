"""The phases of a step: the current one, for reports of faults, and the time, speed and GPU memory of each."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from openppo.types import Comm

GIB = 2**30


class CurrentPhase:
    """Written by the training thread, read by the watchdog at any time."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0  # the global step under way, from 1; 0 before the first
        self.last_progress = time.monotonic()  # a phase began or ended, or a progress bar was updated
        self.on_progress: Callable[[], None] | None = None  # called at each progress, on the training thread

    def progress(self) -> None:
        """Note progress."""
        self.last_progress = time.monotonic()
        if self.on_progress is not None:
            self.on_progress()


current = CurrentPhase()
"""Of this process."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the ``with`` block, or the decorated function, as the current phase."""
    outer = current.phase
    current.phase = name
    current.progress()
    yield
    current.phase = outer  # kept after an exception: the report names the phase in which it was raised
    current.progress()


class PhaseTimer:
    """Seconds, tokens and peak GPU memory by phase. Phases nest; each counts all of itself.

    ``traced`` is a profiler's ``phase``. ``estimated`` is the estimated peak of a phase in bytes.
    """

    def __init__(
        self,
        traced: Callable[[str], AbstractContextManager[None]] | None = None,
        estimated: Mapping[str, int] | None = None,
    ) -> None:
        self._traced = traced
        self._estimated = estimated or {}
        self._seconds: dict[str, float] = {}
        self._tokens: Counter[str] = Counter()
        self._peaks: dict[str, int] = {}
        self._running: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to phase ``name``, which becomes the current phase of this process."""
        assert name not in self._running, f"phase {name} is already running"
        self._record_peak()
        self._running.add(name)
        start = time.perf_counter()
        try:
            with phase(name), self._traced(name) if self._traced else nullcontext():
                yield
                self._record_peak()  # not after an exception: the report names the peak
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._running.remove(name)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The ``with`` block is (a part of) global step ``number``: in its time, its trace and reports of faults."""
        current.step = number
        with self.phase("step"):
            yield

    def count_tokens(self, name: str, n: int) -> None:
        """Count ``n`` more tokens of this rank in phase ``name``."""
        self._tokens[name] += n

    def take_metrics(self, comm: Comm) -> dict[str, float]:
        """``time/<phase>_s`` of the slowest rank and ``speed/<phase>_tokens_per_s`` of all ranks together; then reset.

        On GPUs also ``memory/<phase>_peak_gib`` of the highest rank, and ``memory/<phase>_estimated_gib``.
        Collective: every rank must call it. Only finished phases count.
        """
        seconds: dict[str, float] = {}
        tokens: Counter[str] = Counter()
        peaks: dict[str, int] = {}
        for of_seconds, of_tokens, of_peaks in comm.all_gather_object((self._seconds, self._tokens, self._peaks)):
            seconds |= {name: max(seconds.get(name, 0.0), value) for name, value in of_seconds.items()}
            peaks |= {name: max(peaks.get(name, 0), peak) for name, peak in of_peaks.items()}
            tokens.update(of_tokens)
        self._seconds, self._tokens, self._peaks = {}, Counter(), {}
        speeds = {name: count / seconds[name] for name, count in tokens.items() if seconds.get(name, 0.0) > 0}
        return {
            **{f"time/{name}_s": value for name, value in seconds.items()},
            **{f"speed/{name}_tokens_per_s": value for name, value in speeds.items()},
            **{f"memory/{name}_peak_gib": peak / GIB for name, peak in peaks.items()},
            **{f"memory/{name}_estimated_gib": n / GIB for name, n in self._estimated.items() if name in peaks},
        }

    def _record_peak(self) -> None:
        """Assign queued GPU work and peak memory to the running phases."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            for name in self._running:
                self._peaks[name] = max(self._peaks.get(name, 0), peak)
            torch.cuda.reset_peak_memory_stats()
