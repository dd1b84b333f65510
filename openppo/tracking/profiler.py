"""Traces of chosen steps by torch.profiler."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from openppo import logger
from openppo.config import TrackingConfig
from openppo.tracking.phase import current


class StepProfiler:
    """Writes ``<save_path>/logs/profile/step_<number>_rank_<rank>.json.gz`` for the steps of ``--profile_steps``.

    The trace is written at the end of its step, so that only one is in memory; the parts of a step (``rollout``,
    ``train_on``) have one each, the second with ``_part_2`` in its name. Chrome's tracing and https://ui.perfetto.dev
    open them.
    """

    def __init__(self, save_path: str, tracking: TrackingConfig, rank: int) -> None:
        self.folder = Path(save_path) / "logs" / "profile"
        self.steps = tracking.profiled_steps()
        self.rank = rank
        self._traces: Counter[int] = Counter()  # of each step
        self._is_recording = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the ``with`` block in the trace; the outermost block of a chosen step is recorded."""
        if self._is_recording:
            with torch.profiler.record_function(name):
                yield
        elif current.step in self.steps:
            with self._recorded(), torch.profiler.record_function(name):
                yield
        else:
            yield

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or stderr gets a line at start and stop
        self._is_recording = True
        try:
            # Of the CPU, and of CUDA where there is a GPU.
            with torch.profiler.profile() as profile:
                yield
        finally:
            self._is_recording = False
        self._write(profile)  # not after an exception

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace; a failure is a warning."""
        self._traces[current.step] += 1
        n_traces = self._traces[current.step]
        part = "" if n_traces == 1 else f"_part_{n_traces}"
        file = self.folder / f"step_{current.step:08d}_rank_{self.rank}{part}.json.gz"

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(file))
        except OSError as error:
            logger.warning("--profile_steps: no trace of step %d (%s)", current.step, error)
        else:
            logger.info("--profile_steps: the trace of step %d is %s", current.step, file)
