"""Traces of chosen steps by torch.profiler."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from openppo import logger
from openppo.config import TrackingConfig
from openppo.tracking.phase import current

RECORDED_SECONDS = 2.0
"""Recorded part of each phase: a loop looks alike after that, and a whole trace would fill the memory."""


class StepProfiler:
    """Writes ``<save_path>/logs/profile/step_<number>_rank_<rank>.json.gz`` for the steps of ``--profile_steps``.

    The trace names all phases whole and records the first seconds inside each. It is written at the end of its step, so
    that only one is in memory; the parts of a step (``rollout``, ``train_on``) have one each, the second with
    ``_part_2`` in its name. Chrome's tracing and https://ui.perfetto.dev open them.
    """

    def __init__(self, save_path: str, tracking: TrackingConfig, rank: int) -> None:
        self.folder = Path(save_path) / "logs" / "profile"
        self.steps = tracking.profiled_steps()
        self.rank = rank
        self._traces: Counter[int] = Counter()  # of each step
        self._profile: torch.profiler.profile | None = None
        self._pause_at = 0.0  # time.monotonic(); minus infinity while paused

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the ``with`` block in the trace; the outermost one starts the recording if its step is chosen."""
        if self._profile is None and current.step not in self.steps:
            yield
            return

        with self._recorded() if self._profile is None else nullcontext():
            self._resume()
            with torch.profiler.record_function(name):
                yield
                self._resume()  # the end of a phase is recorded too

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or stderr gets a line at start and stop
        self._profile = torch.profiler.profile()  # of the CPU, and of CUDA where there is a GPU
        self._profile.start()
        self._pause_at = float("inf")

        try:
            with current.watched(self._pause_when_due):
                yield
        finally:
            profile, self._profile = self._profile, None
            profile.stop()
        self._write(profile)  # not after an exception

    def _resume(self) -> None:
        if self._pause_at == float("-inf"):
            self._toggle(True)
        self._pause_at = time.monotonic() + RECORDED_SECONDS

    def _pause_when_due(self) -> None:
        is_paused = self._pause_at == float("-inf")
        if not is_paused and time.monotonic() >= self._pause_at:
            self._toggle(False)
            self._pause_at = float("-inf")

    def _toggle(self, enable: bool) -> None:
        assert self._profile is not None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

        # C++ warns each time on file 2, through the middle of progress bars.
        sys.stderr.flush()
        with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(2), "wb") as stderr:
            os.dup2(nowhere.fileno(), 2)
            try:
                self._profile.toggle_collection_dynamic(enable, kinds)
            finally:
                os.dup2(stderr.fileno(), 2)

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
