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
SHARE_OF_TIME = 0.02
"""Largest share of a run's time that goes into its page before the end."""
SECONDS_BETWEEN = 30.0
"""Shortest time between two pages."""
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
    """Prints the metrics of a step that are named in ``headline``, on as many lines as the terminal needs.

    At step 1 and every ``samples_every`` steps (0: never) it also prints the first sample, shortened.
    """

    name = "the console"

    def __init__(self, headline: Sequence[str], total_steps: int, samples_every: int = 0) -> None:
        self._headline = tuple(headline)
        self._total_steps = total_steps
        self._samples_every = samples_every
        self._widths: dict[str, int] = {}  # of numbers so far, so that lines stand in columns

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        names = [name for name in self._headline if name in metrics]
        if not names:
            return

        parts = [self._part(name, metrics[name]) for name in names]
        total = str(self._total_steps)
        start = f"step {step:{len(total)}}/{total}"
        for line in _filled(start, parts, columns(sys.stdout)):
            write_line(line, sys.stdout)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        if not samples or self._samples_every == 0:
            return

        if step == 1 or step % self._samples_every == 0:
            rows = _described(step, samples[0])
            for line in table_lines(rows, indent=2, stream=sys.stdout):
                write_line(line, sys.stdout)

    def _part(self, name: str, value: float) -> str:
        if name == STEP_TIME:
            return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"
        number = f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
        self._widths[name] = max(self._widths.get(name, 0), len(number))
        return f"{name} {number:>{self._widths[name]}}"


def _filled(start: str, parts: Sequence[str], width: int) -> list[str]:
    """Fill lines of ``width`` with ``start`` and ``parts`` between bars, which stand below each other."""
    lines = [start]
    for part in parts:
        if len(f"{lines[-1]} | {part}") > width:
            lines.append(" " * len(start))
        lines[-1] += f" | {part}"
    return lines


def _described(step: int, sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows that describe a sample: facts, end of the prompt, start of the response."""
    facts = [f"of step {step}"]
    if sample.get("evaluation"):
        facts.append("evaluation")
    if "reward" in sample:
        facts.append(f"reward {sample['reward']:.4g}")
    if "finish_reason" in sample:
        facts.append(f"ended by {sample['finish_reason']}")
    if sample.get("label") is not None:
        facts.append(f"label {escape_control(str(sample['label']), 40)}")

    prompt = escape_control(sample.get("prompt", ""), _LONGEST_PROMPT, keep="end")
    response = escape_control(sample.get("response", ""), _LONGEST_RESPONSE)
    return [("sample", ", ".join(facts)), ("prompt", prompt), ("response", response)]


class JSONLTracker(Tracker):
    """Appends to ``metrics.jsonl``, ``samples.jsonl`` and ``tokens.jsonl``; infinite numbers and NaN become null."""

    name = "logs/*.jsonl"

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        run_files = [self._folder / name for name in RUN_FILES]
        self._run_files = {file.name: file.read_bytes() for file in run_files if file.is_file()}
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
                text = json.dumps(line, ensure_ascii=False, allow_nan=False, default=str)
                file.write(f"{text}\n")

    def _make_again(self) -> None:
        logger.warning(
            "%s was removed during the run: it is made again, without what was logged before",
            self._folder,
        )
        self._folder.mkdir(parents=True)
        for name, content in self._run_files.items():
            (self._folder / name).write_bytes(content)


def json_form(value: Any) -> Any:
    """Return ``value`` as it is read back from JSON lines: objects that JSON does not know become text."""
    return json.loads(json.dumps(_finite(value), allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    """Replace infinite numbers and NaN in ``value`` by null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class HealthTracker(Tracker):
    """Warns on the console when a rule of health finds something new. ``logs`` is the run's folder of logs.

    A resumed run does not repeat the warnings of the steps before.
    """

    name = "the rules of health"
    errors = _FAILURES

    def __init__(self, logs: Path) -> None:
        run = read_run(logs)
        self._health = Health(run.config, RULES)
        # A failure on these rows is reported when it occurs again.
        with contextlib.suppress(*_FAILURES):
            for row in run.metrics:
                self._health.look(row["step"], row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for finding in self._health.look(step, metrics):
            logger.warning("step %d: %s", step, finding.text)


class ReportTracker(Tracker):
    """Writes ``report.html`` into the folder of logs: at the first step, now and then, and at the end."""

    name = "the report"
    errors = _FAILURES

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._page = logs / "report.html"
        self._next = 0.0  # time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        begin = time.monotonic()
        if begin >= self._next:
            write_report([self._logs], self._page, True)
            end = time.monotonic()
            self._next = end + max(SECONDS_BETWEEN, (end - begin) / SHARE_OF_TIME)

    def close(self) -> None:
        write_report([self._logs], self._page, False)
        logger.info("the report of this run is %s", self._page)
