"""While a run goes on: its warnings on the console, and its page kept fresh."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openppo.tracking.histogram import Histogram
from openppo.tracking.log import get_logger
from openppo.tracking.report.health import Health
from openppo.tracking.report.page import write_report
from openppo.tracking.report.run_data import read_run

SHARE_OF_TIME = 0.02
"""Of a run, at most, that goes into its page before the end."""
SECONDS_BETWEEN = 30.0
"""Between two pages at least."""
_FAILURES = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError)
"""What a strange log or a mistake of ours may cause: a run never ends for its report."""


class HealthTracker:
    """Warns on the console when a rule of health finds something. ``logs`` is the run's folder of logs.

    A run that goes on has been warned of what its logs say already.
    """

    name = "the rules of health"
    errors: tuple[type[Exception], ...] = _FAILURES

    def __init__(self, logs: Path) -> None:
        run = read_run(logs)
        self._health = Health(run.config)
        with contextlib.suppress(*_FAILURES):  # what fails on these rows fails again at the first report, and says so
            for row in run.metrics:
                self._health.look(row["step"], row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step."""
        for finding in self._health.look(step, metrics):
            get_logger().warning("step %d: %s", step, finding.text)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Rules are about metrics."""

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Rules are about metrics."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Rules are about metrics."""

    def close(self) -> None:
        """Nothing to close."""


class ReportTracker:
    """Writes ``report.html`` into the run's folder of logs: at the first report, now and then, and at the end."""

    name = "the report"
    errors: tuple[type[Exception], ...] = _FAILURES

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._next = 0.0  # time.monotonic()
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the page if it is time to."""
        begin = time.monotonic()
        if begin < self._next:
            return
        self._write(running=True)
        end = time.monotonic()
        self._next = end + max(SECONDS_BETWEEN, (end - begin) / SHARE_OF_TIME)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """The page reads them from the logs."""

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """The page reads them from the logs."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Histograms are for dashboards."""

    def close(self) -> None:
        """Write the page a last time and say where it is."""
        if self._write(running=False):
            get_logger().info("the report of this run is %s", self._logs / "report.html")

    def _write(self, running: bool) -> bool:
        """Whether it worked; the first failure is logged."""
        try:
            write_report([self._logs], self._logs / "report.html", running)
        except _FAILURES as error:
            if not self._failed:
                get_logger().warning(
                    "the report cannot be written (%s: %s), the run goes on", type(error).__name__, error
                )
            self._failed = True
            return False
        return True
