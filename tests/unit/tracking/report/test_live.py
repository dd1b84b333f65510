"""While a run goes on: it is warned once, its page is fresh at a bounded price, and neither can stop it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from openppo.config import TrackingConfig
from openppo.tracking import Trackers, make_trackers
from openppo.tracking.report import health, live
from openppo.tracking.report.live import HealthTracker, ReportTracker
from openppo.tracking.report.rules import Rule
from openppo.types import SingleProcess

MakeRun = Callable[..., Path]


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(live, "time", made)
    return made


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="openppo")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_run_is_warned_once(make_run: MakeRun, warnings: Callable[[], list[str]]) -> None:
    tracker = HealthTracker(make_run("run", metrics=[], config={"generate_max_len": 16}) / "logs")
    for step in range(1, 20):
        tracker.log(step, {"truncated_fraction": 0.9})
    (warning,) = warnings()
    assert warning.startswith("step 5: 90% of the responses are cut at --generate_max_len 16 since step 1")


def test_a_run_that_goes_on_is_not_warned_again(make_run: MakeRun, warnings: Callable[[], list[str]]) -> None:
    before = [{"step": step, "truncated_fraction": 0.9} for step in range(1, 11)]
    tracker = HealthTracker(make_run("run", metrics=before) / "logs")
    for step in range(11, 30):
        tracker.log(step, {"truncated_fraction": 0.9})
    assert warnings() == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("a bug"), ValueError("bad"), ZeroDivisionError()])
def test_a_rule_that_fails_warns_once_and_the_run_goes_on(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]], error: Exception
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(health, "RULES", [Rule("broken", ("reward",), fail)])
    trackers = Trackers([HealthTracker(make_run("run") / "logs")])  # whose logs have a row to look at already
    for step in range(2, 5):
        trackers.log(step, {"reward": 1.0})
    (warning,) = warnings()
    assert warning.startswith(f"the rules of health: {type(error).__name__}")
    assert warning.endswith("it is switched off, the run goes on.")


def test_the_page_takes_a_fiftieth_of_the_time(
    make_run: MakeRun, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[float, bool]] = []

    def write(folders: list[Path], output: Path, running: bool) -> None:
        written.append((clock.now, running))
        clock.now += 10.0

    monkeypatch.setattr(live, "write_report", write)
    tracker = ReportTracker(make_run("run") / "logs")
    for step in range(2000):
        tracker.log(step, {})
        clock.now += 1.0
    tracker.close()
    times = [time for time, running in written if running]
    assert times[0] == 1000.0
    assert 10.0 * (len(times) - 1) / (times[-1] - times[0]) <= 0.02
    assert len(times) == 4  # of about 2,040 seconds one in 510
    assert written[-1][1] is False


def test_a_quick_page_is_written_every_half_minute(
    make_run: MakeRun, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    monkeypatch.setattr(live, "write_report", lambda *_: written.append(clock.now))
    tracker = ReportTracker(make_run("run") / "logs")
    for step in range(300):
        tracker.log(step, {})
        clock.now += 1.0
    assert written == [1000.0 + 30 * i for i in range(10)]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("a bug"), ValueError("bad"), ZeroDivisionError()])
def test_a_page_that_fails_warns_once_and_the_run_goes_on(
    make_run: MakeRun,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    error: Exception,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(live, "write_report", fail)
    tracker = ReportTracker(make_run("run") / "logs")
    for step in range(10):
        tracker.log(step, {})
        clock.now += 1000.0
    tracker.close()
    (warning,) = warnings()
    assert "the report cannot be written" in warning
    assert type(error).__name__ in warning


def test_every_run_leaves_a_report_with_its_last_step(tmp_path: Path) -> None:
    trackers = make_trackers(str(tmp_path), TrackingConfig(), {}, SingleProcess(), [], total_steps=2)
    trackers.log(1, {"reward": 1.0})
    report = tmp_path / "logs" / "report.html"
    first = report.read_text()
    trackers.log_samples(2, [{"sample": 0, "prompt": "p", "response": "r", "reward": 1.0}])
    trackers.log_tokens(2, [{"sample": 0, "texts": ["r"], "value": [0.25]}])
    trackers.log(2, {"reward": 2.0})
    assert report.read_text() == first, "half a minute has not passed"
    trackers.close()
    data = [json.loads(re.search(r'id="data">(.*?)</script>', text)[1]) for text in (first, report.read_text())]  # type: ignore[index]
    assert [(found["running"], found["runs"][0]["last_step"]) for found in data] == [(True, 1), (False, 2)]
    assert data[1]["runs"][0]["samples"][0]["tokens"]["value"] == [0.25]
