"""Seconds, tokens per second and peak GPU memory of each phase of a step."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from openppo.tracking.phase import current, gpu_in_use
from openppo.types import Comm

GIB = 2**30


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
            with current.named(name), self._traced(name) if self._traced else nullcontext():
                yield
                self._record_peak()  # not after an exception: the report names the peak
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._running.remove(name)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the ``with`` block as global step ``number``, or as a part of it.

        It counts in the time of that step, in its trace and in reports of faults.
        """
        current.begin_step(number)
        with self.phase("step"):
            yield

    def count_tokens(self, name: str, n: int) -> None:
        """Count ``n`` more tokens of this rank in phase ``name``."""
        self._tokens[name] += n

    def take_metrics(self, comm: Comm, others: int = 0) -> dict[str, float]:
        """Return times, speeds and GPU memory of the phases since the last call.

        - ``time/<phase>_s`` of the slowest rank, also of the times in ``current``;
        - ``speed/<phase>_tokens_per_s`` of all ranks together; per device, those of whole steps also count ``others``,
          ranks that only sample;
        - with several ranks ``speed/<phase>_imbalance``: tokens of the rank with the most, over the mean, minus 1;
        - on GPUs ``memory/<phase>_peak_gib`` of the highest rank, and ``memory/<phase>_estimated_gib``.

        Collective: every rank must call it. Only finished phases count.
        """
        measured = (self._seconds | current.take_seconds(), self._tokens, self._peaks)
        seconds: dict[str, float] = {}  # of the slowest rank
        tokens: dict[str, list[int]] = {}  # of each rank that counted any
        peaks: dict[str, int] = {}  # of the highest rank
        for rank_seconds, rank_tokens, rank_peaks in comm.all_gather_object(measured):
            for name, value in rank_seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
            for name, peak in rank_peaks.items():
                peaks[name] = max(peaks.get(name, 0), peak)
            for name, count in rank_tokens.items():
                tokens.setdefault(name, []).append(count)

        self._seconds = {}
        self._tokens = Counter()
        self._peaks = {}

        tokens = {name: counts for name, counts in tokens.items() if seconds.get(name, 0.0) > 0}
        metrics = {f"time/{name}_s": value for name, value in seconds.items()}
        metrics |= _speeds(tokens, seconds, n_devices=comm.world_size + others)
        if comm.world_size > 1:
            metrics |= _imbalances(tokens, comm.world_size)
        metrics |= {f"memory/{name}_peak_gib": peak / GIB for name, peak in peaks.items()}
        for name, peak in self._estimated.items():
            if name in peaks:
                metrics[f"memory/{name}_estimated_gib"] = peak / GIB
        return metrics

    def _record_peak(self) -> None:
        """Assign queued GPU work and peak memory to the running phases."""
        if gpu_in_use():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            for name in self._running:
                self._peaks[name] = max(self._peaks.get(name, 0), peak)
            torch.cuda.reset_peak_memory_stats()


def _speeds(
    tokens: Mapping[str, Sequence[int]], seconds: Mapping[str, float], n_devices: int
) -> dict[str, float]:
    """Tokens per second by phase; those of whole steps per device, too."""
    speeds = {}
    for name, counts in tokens.items():
        speeds[f"speed/{name}_tokens_per_s"] = sum(counts) / seconds[name]
    if "step" in tokens:
        step_speed = speeds["speed/step_tokens_per_s"]
        speeds["speed/step_tokens_per_s_per_device"] = step_speed / n_devices
    return speeds


def _imbalances(tokens: Mapping[str, Sequence[int]], n_ranks: int) -> dict[str, float]:
    """Tokens of the rank with the most, over the mean of the ranks, minus 1, by phase."""
    imbalances = {}
    for name, counts in tokens.items():
        if any(counts):
            share = max(counts) / sum(counts)
            imbalances[f"speed/{name}_imbalance"] = n_ranks * share - 1
    return imbalances
