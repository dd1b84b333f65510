"""Console, JSON lines, and the run's report."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openppo.tracking.console import columns, escape_control, logger, table_lines, write_line
from openppo.tracking.report.health import Health
from openppo.tracking.report.page import write_report
from openppo.tracking.report.rules import RULES
from openppo.tracking.report.run_data import read_run
from openppo.tracking.run_folder import RUN_FILES
from openppo.tracking.trackers.tracker import Tracker

STEP_TIME = "time/step_s"
SHARE_OF_TIME, SECONDS_BETWEEN = 0.02, 30.0
"""Of a run that goes into its page before the end, at most; between two pages, at least."""
_LONGEST_PROMPT, _LONGEST_RESPONSE = 300, 600
_FAILURES = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)
"""Errors from unusual logs or bugs; they never end a run."""


class ConsoleTracker(Tracker):
    """Prints the metrics of a step that are named in ``headline``, on one line or as many as the terminal needs.

    Of step 1 and every ``samples_every`` steps (0: never) it prints the first sample, shortened, on lines of its own.
    """

    name = "the console"

    def __init__(self, headline: Sequence[str], total_steps: int, samples_every: int = 0) -> None:
        self._headline = tuple(headline)
        self._total_steps = total_steps
        self._samples_every = samples_every
        self._widths: dict[str, int] = {}  # of numbers so far, so that lines stand in columns

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [self._part(name, metrics[name]) for name in self._headline if name in metrics]
        if parts:
            count = f"{step:{len(str(self._total_steps))}}/{self._total_steps}"
            for line in _filled(f"step {count}", parts, columns(sys.stdout)):
                write_line(line, sys.stdout)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        is_shown = self._samples_every > 0 and (step == 1 or step % self._samples_every == 0)
        if samples and is_shown:
            for line in table_lines(_described(step, samples[0]), indent=2, stream=sys.stdout):
                write_line(line, sys.stdout)

    def _part(self, name: str, value: float) -> str:
        if name == STEP_TIME:
            return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"
        number = f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
        self._widths[name] = max(self._widths.get(name, 0), len(number))
        return f"{name} {number:>{self._widths[name]}}"


def _filled(start: str, parts: Sequence[str], width: int) -> list[str]:
    """``start`` and ``parts`` between bars, on as few lines of ``width`` as hold them; bars stand below each other."""
    lines = [start]
    for part in parts:
        if len(f"{lines[-1]} | {part}") > width:
            lines.append(" " * len(start))
        lines[-1] += f" | {part}"
    return lines


def _described(step: int, sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts, end of the prompt and start of the response, by name."""
    facts = [f"of step {step}" + (", evaluation" if sample.get("evaluation") else "")]
    if "reward" in sample:
        facts.append(f"reward {sample['reward']:.4g}")
    if "finish_reason" in sample:
        facts.append(f"ended by {sample['finish_reason']}")
    if sample.get("label") is not None:
        facts.append(f"label {escape_control(str(sample['label']), 40)}")
    return [
        ("sample", ", ".join(facts)),
        ("prompt", escape_control(sample.get("prompt", ""), _LONGEST_PROMPT, keep="end")),
        ("response", escape_control(sample.get("response", ""), _LONGEST_RESPONSE)),
    ]


class JSONLTracker(Tracker):
    """Appends to ``metrics.jsonl``, ``samples.jsonl`` and ``tokens.jsonl``; numbers that are not finite become null."""

    name = "logs/*.jsonl"

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        beside = [self._folder / name for name in RUN_FILES]
        self._beside = {file.name: file.read_bytes() for file in beside if file.is_file()}
        self._append("metrics.jsonl", 0, [])  # fails now rather than at the first step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", step, [metrics])

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._append("samples.jsonl", step, samples)

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._append("tokens.jsonl", step, rows)

    def _append(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not self._folder.exists():
            self._make_again()
        with open(self._folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
            for row in rows:
                clash = row.keys() & {"step", "time"}
                assert not clash, f"{clash} are names of the line itself"
                line = _finite({"step": step, "time": time.time(), **row})
                file.write(
                    json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n"
                )

    def _make_again(self) -> None:
        logger.warning(
            "%s was removed during the run: it is made again, without what was logged before",
            self._folder,
        )
        self._folder.mkdir(parents=True)
        for name, content in self._beside.items():
            (self._folder / name).write_bytes(content)


def json_form(value: Any) -> Any:
    """``value`` as JSON lines give it back: what JSON does not know becomes text."""
    return json.loads(json.dumps(_finite(value), allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    """``value`` with null for each number that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class HealthTracker(Tracker):
    """Warns on the console when a rule of health finds something new. ``logs`` is the run's folder of logs.

    A resumed run has warned already of what its logs show.
    """

    name = "the rules of health"
    errors = _FAILURES

    def __init__(self, logs: Path) -> None:
        run = read_run(logs)
        self._health = Health(run.config, RULES)
        with contextlib.suppress(
            *_FAILURES
        ):  # a failure on these rows is reported when it comes again
            for row in run.metrics:
                self._health.look(row["step"], row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for finding in self._health.look(step, metrics):
            logger.warning("step %d: %s", step, finding.text)


class ReportTracker(Tracker):
    """Writes ``report.html`` into the folder of logs: at the first report, now and then, and at the end."""

    name = "the report"
    errors = _FAILURES

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._next = 0.0  # time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        begin = time.monotonic()
        if begin >= self._next:
            write_report([self._logs], self._logs / "report.html", True)
            end = time.monotonic()
            self._next = end + max(SECONDS_BETWEEN, (end - begin) / SHARE_OF_TIME)

    def close(self) -> None:
        write_report([self._logs], self._logs / "report.html", False)
        logger.info("the report of this run is %s", self._logs / "report.html")
