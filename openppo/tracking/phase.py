"""The phases of a step: the current one, for reports of faults; time, speed and GPU memory of each; traces."""

import functools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from openppo import logger
from openppo.config import TrackingConfig
from openppo.types import Comm, Interrupted

GIB = 2**30
RECORDED_SECONDS = 2.0
"""Of each phase: a loop looks alike after that, and a trace of all of it would fill the memory."""


class CurrentPhase:
    """Written by the training thread, read by the watchdog at any time."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.step = 0  # the global step under way, from 1; 0 before the first
        self.last_progress = (
            time.monotonic()
        )  # a phase began or ended, or a progress bar was updated
        self.on_progress: Callable[[], None] | None = (
            None  # called at each progress, on the training thread
        )
        self.seconds: dict[
            str, float
        ] = {}  # of roles, and of phases outside of a timer, until a line reports them
        self.events: list[
            tuple[str, Any, Any]
        ] = []  # begin and end of more of them in a GPU's queue

    def take_seconds(self) -> dict[str, float]:
        """The seconds since the last call; waits for the last of the events."""
        for name, begin, end in self.events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)
        taken = self.seconds
        self.seconds = {}
        self.events = []
        return taken

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def progress(self) -> None:
        """Note progress."""
        self.last_progress = time.monotonic()
        if self.on_progress is not None:
            self.on_progress()


current = CurrentPhase()
"""Of this process."""


@contextmanager
def named_phase(name: str) -> Iterator[None]:
    """Name the ``with`` block as the current phase."""
    outer = current.phase
    current.phase = name
    current.progress()
    try:
        yield
    except Interrupted:
        current.phase = outer
        raise
    current.phase = (
        outer  # kept after other exceptions: the report names the phase in which they were raised
    )
    current.progress()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the ``with`` block, or the decorated function, as the current phase, and add its time to ``current``."""
    with timed(name), named_phase(name):
        yield


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Add the time of the ``with`` block to ``current``; of an evaluation only the whole.

    On a GPU it is that between two places in its queue, so that nothing waits for it.
    """
    is_part, on_gpu = current.phase == "evaluation" != name, _gpu_in_use()
    begin, end = (
        (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)
    )
    if begin:
        begin.record()
    start = time.perf_counter()
    yield
    if end:
        end.record()
        current.events += [] if is_part else [(name, begin, end)]
    elif not is_part:
        current.add(name, time.perf_counter() - start)


def evaluation(method: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    """Run a trainer's method as phase "evaluation", whose time is added to the metrics that it returns, if any."""

    @functools.wraps(method)
    def run(trainer: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        with phase("evaluation"):
            metrics = method(trainer, *args, **kwargs)
        current.seconds = current.take_seconds()
        seconds = torch.tensor(current.seconds.pop("evaluation"), dtype=torch.float64)
        return metrics and metrics | {
            "time/evaluation_s": float(trainer.comm.all_reduce(seconds, "max"))
        }

    return run


def _gpu_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


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
            with named_phase(name), self._traced(name) if self._traced else nullcontext():
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

    def take_metrics(self, comm: Comm, others: int = 0) -> dict[str, float]:
        """``time/<phase>_s`` of the slowest rank and ``speed/<phase>_tokens_per_s`` of all ranks together; then reset.

        Also the times in ``current``. With several ranks also ``speed/<phase>_imbalance``: tokens of the rank with the
        most, over the mean, minus 1. Speed per device counts ``others``, ranks that only sample.
        On GPUs also ``memory/<phase>_peak_gib`` of the highest rank, and ``memory/<phase>_estimated_gib``.
        Collective: every rank must call it. Only finished phases count.
        """
        seconds: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}  # of the ranks that count any
        peaks: dict[str, int] = {}
        mine = self._seconds | current.take_seconds()
        for of_seconds, of_tokens, of_peaks in comm.all_gather_object(
            (mine, self._tokens, self._peaks)
        ):
            seconds |= {
                name: max(seconds.get(name, 0.0), value) for name, value in of_seconds.items()
            }
            peaks |= {name: max(peaks.get(name, 0), peak) for name, peak in of_peaks.items()}
            tokens |= {name: [*tokens.get(name, []), count] for name, count in of_tokens.items()}
        self._seconds = {}
        self._tokens = Counter()
        self._peaks = {}
        tokens = {name: counts for name, counts in tokens.items() if seconds.get(name, 0.0) > 0}
        shares = {
            name: max(counts) / sum(counts)
            for name, counts in tokens.items()
            if any(counts) and comm.world_size > 1
        }
        rates = {
            f"speed/{name}_tokens_per_s": sum(counts) / seconds[name]
            for name, counts in tokens.items()
        }
        whole = {
            f"{name}_per_device": n / (comm.world_size + others)
            for name, n in rates.items()
            if "/step_" in name
        }
        return {
            **{f"time/{name}_s": value for name, value in seconds.items()},
            **rates | whole,
            **{
                f"speed/{name}_imbalance": comm.world_size * share - 1
                for name, share in shares.items()
            },
            **{f"memory/{name}_peak_gib": peak / GIB for name, peak in peaks.items()},
            **{
                f"memory/{name}_estimated_gib": n / GIB
                for name, n in self._estimated.items()
                if name in peaks
            },
        }

    def _record_peak(self) -> None:
        """Assign queued GPU work and peak memory to the running phases."""
        if _gpu_in_use():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            for name in self._running:
                self._peaks[name] = max(self._peaks.get(name, 0), peak)
            torch.cuda.reset_peak_memory_stats()


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
        current.on_progress = self._pause_when_due
        try:
            yield
        finally:
            current.on_progress = None
            profile, self._profile = self._profile, None
            profile.stop()
        self._write(profile)  # not after an exception

    def _resume(self) -> None:
        if self._pause_at == float("-inf"):
            self._toggle(True)
        self._pause_at = time.monotonic() + RECORDED_SECONDS

    def _pause_when_due(self) -> None:
        if time.monotonic() >= self._pause_at > float("-inf"):
            self._toggle(False)
            self._pause_at = float("-inf")

    def _toggle(self, enable: bool) -> None:
        assert self._profile is not None
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        sys.stderr.flush()
        with open(os.devnull, "wb") as nowhere, os.fdopen(os.dup(2), "wb") as kept:
            os.dup2(
                nowhere.fileno(), 2
            )  # or C++ warns each time, through the middle of progress bars
            try:
                self._profile.toggle_collection_dynamic(enable, kinds)
            finally:
                os.dup2(kept.fileno(), 2)

    def _write(self, profile: torch.profiler.profile) -> None:
        """Write the trace; a failure is a warning."""
        self._traces[current.step] += 1
        part = "" if self._traces[current.step] == 1 else f"_part_{self._traces[current.step]}"
        file = self.folder / f"step_{current.step:08d}_rank_{self.rank}{part}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(file))
        except OSError as error:
            logger.warning("--profile_steps: no trace of step %d (%s)", current.step, error)
        else:
            logger.info("--profile_steps: the trace of step %d is %s", current.step, file)
