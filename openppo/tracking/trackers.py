"""Where metrics and samples go: console, JSON lines, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tqdm import tqdm

from openppo.config import RunConfig
from openppo.tracking.log import get_logger
from openppo.tracking.report.live import HealthTracker, ReportTracker
from openppo.types import Comm

STEP_TIME = "time/step_s"


class Tracker(Protocol):
    """Something that records what a run reports. Only rank 0 has trackers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record samples (prompt, response, score and so on) of a step."""
        ...

    def close(self) -> None:
        """Write out what is left; nothing is logged afterwards."""
        ...


@runtime_checkable
class TokenTracker(Protocol):
    """A tracker that also records samples token by token."""

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record one row for each sample: lists over the tokens of its response."""
        ...


class JSONLTracker:
    """Appends to ``metrics.jsonl``, ``samples.jsonl`` and ``tokens.jsonl``; numbers not finite become null."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._append("metrics.jsonl", [])  # fails now rather than at the first step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line: step, Unix time, metrics."""
        self._append("metrics.jsonl", [_json_line(step, metrics)])

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append one line for each sample."""
        self._append("samples.jsonl", [_json_line(step, sample) for sample in samples])

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append one line for each sample that is described token by token."""
        self._append("tokens.jsonl", [_json_line(step, row) for row in rows])

    def close(self) -> None:
        """Nothing to close: no file stays open between lines."""

    def _append(self, name: str, lines: list[str]) -> None:
        with open(self._folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)


class TensorBoardTracker:
    """Writes TensorBoard event files: scalars by metric name, samples as text.

    A run that goes on from step ``go_on_from`` has TensorBoard forget what was written after it.
    """

    def __init__(self, folder: str | Path, go_on_from: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--use_tensorboard needs the package tensorboard: run 'pip install tensorboard', or leave the flag out."
            ) from error
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=None if go_on_from is None else go_on_from + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Write each sample as a text of its own: ``samples/0``, ``samples/1``, ..."""
        for index, sample in enumerate(samples):
            self._writer.add_text(f"samples/{index}", _markdown(sample), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class ConsoleTracker:
    """Prints one line per step to stdout with the metrics named in ``headline``; none of them, no line."""

    def __init__(self, headline: Sequence[str], total_steps: int) -> None:
        self._headline = tuple(headline)
        self._total_steps = total_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line."""
        parts = [_headline_part(name, metrics[name]) for name in self._headline if name in metrics]
        if parts:
            tqdm.write(" | ".join([f"step {step}/{self._total_steps}", *parts]), file=sys.stdout)
            sys.stdout.flush()

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Samples are too long for the console."""

    def close(self) -> None:
        """Nothing to close."""


class Trackers:
    """Hands everything to each tracker. One that fails with ``OSError`` is switched off with a warning."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Record samples of a step."""
        self._each(lambda tracker: tracker.log_samples(step, samples))

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Record the tokens of samples of a step, where a tracker has a place for them."""
        self._each(lambda tracker: tracker.log_tokens(step, rows) if isinstance(tracker, TokenTracker) else None)

    def close(self) -> None:
        """Close all trackers; further calls do nothing."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except OSError as error:
                name = type(tracker).__name__
                get_logger().warning("%s cannot write (%s): it is switched off, the run goes on.", name, error)
                self._trackers.remove(tracker)
                with contextlib.suppress(OSError):
                    tracker.close()


def make_trackers(
    run: RunConfig, comm: Comm, headline: Sequence[str], total_steps: int, go_on_from: int | None = None
) -> Trackers:
    """The trackers that ``run`` asks for, on rank 0; none on other ranks. Logs go to ``<save_path>/logs``."""
    if comm.rank != 0:
        return Trackers([])
    trackers: list[Tracker] = [ConsoleTracker(headline, total_steps)]
    logs = Path(run.save_path) / "logs"
    try:
        trackers.append(JSONLTracker(logs))
        trackers += [HealthTracker(logs), ReportTracker(logs)]  # they read what the one before writes
    except OSError as error:
        raise ValueError(f"--save_path {run.save_path} cannot be written ({error}): choose another folder.") from error
    if run.use_tensorboard is not None:
        try:
            trackers.append(TensorBoardTracker(run.use_tensorboard, go_on_from))
        except OSError as error:
            raise ValueError(f"--use_tensorboard {run.use_tensorboard} cannot be written ({error}).") from error
    return Trackers(trackers)


def _json_line(step: int, content: Mapping[str, Any]) -> str:
    clash = content.keys() & {"step", "time"}
    assert not clash, f"{clash} are names of the line itself"
    line = {"step": step, "time": time.time(), **content}
    return json.dumps(_finite(line), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """``value`` with null in place of each number that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(sample: Mapping[str, Any]) -> str:
    """Each entry as a heading and a literal block, so that the text shows as it is."""
    blocks = []
    for key, value in sample.items():
        literal = "\n".join("    " + line for line in str(value).split("\n"))
        blocks.append(f"**{key}**\n\n{literal}")
    return "\n\n".join(blocks)


def _headline_part(name: str, value: float) -> str:
    number = f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
    if name == STEP_TIME:
        return f"{value:.1f} s"
    return f"{name} {number}"
