"""Time and GPU memory of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from openppo.tracking.phase import begin_step
from openppo.tracking.phase import phase as current_phase
from openppo.tracking.profiler import NoProfiler, StepProfiler
from openppo.types import Comm


class PhaseTimer:
    """Seconds, tokens and peaks of GPU memory by phase. Phases may lie inside each other; each counts all of itself.

    ``profiler`` names them in its traces. ``estimated`` is the peak in bytes that was estimated for a phase.
    """

    def __init__(
        self, profiler: StepProfiler | NoProfiler | None = None, estimated: Mapping[str, int] | None = None
    ) -> None:
        self._profiler = profiler or NoProfiler()
        self._estimated = estimated or {}
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._running: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to phase ``name``, which is also the current phase of this process."""
        assert name not in self._running, f"phase {name} is already running"
        self._look_at_gpu()
        self._running.add(name)
        start = time.perf_counter()
        try:
            with current_phase(name), self._profiler.phase(name):
                yield
                self._look_at_gpu()  # not after an exception: the report names the peak
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._running.remove(name)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The ``with`` block is (a part of) global step ``number``: in its time, its trace and reports of faults."""
        begin_step(number)
        with self.phase("step"):
            yield

    def count_tokens(self, name: str, n: int) -> None:
        """Say that phase ``name`` worked on ``n`` more tokens on this rank."""
        self._tokens[name] = self._tokens.get(name, 0) + n

    def metrics(self, comm: Comm) -> dict[str, float]:
        """``time/<phase>_s`` of the slowest rank and ``speed/<phase>_tokens_per_s`` of all ranks together.

        On GPUs also ``memory/<phase>_peak_gib`` of the rank that took most, and ``memory/<phase>_estimated_gib``.
        Collective: every rank must call it. Only finished phases count.
        """
        gathered = comm.all_gather_object((self._seconds, self._tokens, self._peaks))
        seconds: dict[str, float] = {}
        tokens: dict[str, int] = {}
        peaks: dict[str, int] = {}
        for of_rank_seconds, of_rank_tokens, of_rank_peaks in gathered:
            for name, value in of_rank_seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
            for name, peak in of_rank_peaks.items():
                peaks[name] = max(peaks.get(name, 0), peak)
            for name, count in of_rank_tokens.items():
                tokens[name] = tokens.get(name, 0) + count
        times = {f"time/{name}_s": value for name, value in seconds.items()}
        speeds = {
            f"speed/{name}_tokens_per_s": count / seconds[name]
            for name, count in tokens.items()
            if seconds.get(name, 0.0) > 0
        }
        memory = {f"memory/{name}_peak_gib": peak / 2**30 for name, peak in peaks.items()}
        known = {name: self._estimated[name] for name in peaks if name in self._estimated}
        return times | speeds | memory | {f"memory/{name}_estimated_gib": peak / 2**30 for name, peak in known.items()}

    def take_metrics(self, comm: Comm) -> dict[str, float]:
        """``metrics``, which then begin anew."""
        metrics = self.metrics(comm)
        self.reset()
        return metrics

    def reset(self) -> None:
        """Forget all finished phases, tokens and peaks."""
        self._seconds.clear()
        self._tokens.clear()
        self._peaks.clear()

    def _look_at_gpu(self) -> None:
        """Assign queued GPU work and peak memory to the running phases."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            for name in self._running:
                self._peaks[name] = max(self._peaks.get(name, 0), peak)
            torch.cuda.reset_peak_memory_stats()
