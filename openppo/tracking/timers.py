"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from openppo.tracking.position import phase as position_phase
from openppo.tracking.profiler import NoProfiler, StepProfiler
from openppo.types import Comm


class PhaseTimer:
    """Seconds and tokens by phase. Phases may lie inside each other; each counts its whole time.

    ``profiler`` names them in its traces.
    """

    def __init__(self, profiler: StepProfiler | NoProfiler | None = None) -> None:
        self._profiler = profiler or NoProfiler()
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._running: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to phase ``name``, which is also this process's position."""
        assert name not in self._running, f"phase {name} is already running"
        self._running.add(name)
        _wait_for_gpu()
        start = time.perf_counter()
        try:
            with position_phase(name), self._profiler.phase(name):
                yield
                _wait_for_gpu()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._running.remove(name)

    def count_tokens(self, name: str, n: int) -> None:
        """Say that phase ``name`` worked on ``n`` more tokens on this rank."""
        self._tokens[name] = self._tokens.get(name, 0) + n

    def metrics(self, comm: Comm) -> dict[str, float]:
        """``time/<phase>_s`` of the slowest rank and ``speed/<phase>_tokens_per_s`` of all ranks together.

        Collective: every rank must call it. Only finished phases count.
        """
        gathered = comm.all_gather_object((self._seconds, self._tokens))
        seconds: dict[str, float] = {}
        tokens: dict[str, int] = {}
        for of_rank_seconds, of_rank_tokens in gathered:
            for name, value in of_rank_seconds.items():
                seconds[name] = max(seconds.get(name, 0.0), value)
            for name, count in of_rank_tokens.items():
                tokens[name] = tokens.get(name, 0) + count
        times = {f"time/{name}_s": value for name, value in seconds.items()}
        speeds = {
            f"speed/{name}_tokens_per_s": count / seconds[name]
            for name, count in tokens.items()
            if seconds.get(name, 0.0) > 0
        }
        return times | speeds

    def reset(self) -> None:
        """Forget all finished phases and tokens."""
        self._seconds.clear()
        self._tokens.clear()


def _wait_for_gpu() -> None:
    """Work queued on the GPU belongs to the phase that queued it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
