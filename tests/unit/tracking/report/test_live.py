"""Warnings and the page of a run that is not over: bounded in time, and never its end."""

import json
import re
from types import SimpleNamespace

import pytest

from openppo.config import TrackingConfig
from openppo.tracking import Trackers, make_trackers
from openppo.tracking.report.health import Rule
from openppo.tracking.trackers import local
from openppo.tracking.trackers.local import HealthTracker, ReportTracker
from openppo.types import SingleProcess
from tests.unit.tracking.report.runs import write_run


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(local, "time", made)
    return made


@pytest.mark.parametrize("n_before", [0, 10])
def test_a_run_is_warned_once_also_when_resumed(tmp_path, caplog, n_before):
    before = [{"step": step, "truncated_fraction": 0.9} for step in range(1, n_before + 1)]
    tracker = HealthTracker(
        write_run(tmp_path / "run", before, config={"generate_max_len": 16}) / "logs"
    )
    for step in range(n_before + 1, 30):
        tracker.log(step, {"truncated_fraction": 0.9})
    assert len(caplog.messages) == (n_before == 0)
    for message in caplog.messages:
        assert message.startswith(
            "step 5: 90% of the responses are cut at --generate_max_len 16 since step 1"
        )


@pytest.mark.parametrize(
    ("seconds", "expected"), [(10.0, [1000, 1510, 2020, 2530]), (0.0, [*range(1000, 3000, 30)])]
)
def test_the_page_takes_a_fiftieth_of_the_time_and_comes_twice_a_minute_at_most(
    tmp_path, clock, monkeypatch, seconds, expected
):
    written = []

    def write(folders, output, running):
        written.append((clock.now, running))
        clock.now += seconds

    monkeypatch.setattr(local, "write_report", write)
    tracker = ReportTracker(write_run(tmp_path / "run") / "logs")
    for step in range(2000):
        tracker.log(step, {})
        clock.now += 1.0
    tracker.close()
    assert [time for time, running in written if running] == expected
    assert written[-1][1] is False


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("a bug"), ZeroDivisionError()])
def test_a_rule_or_page_that_fails_warns_once_and_the_run_continues(
    tmp_path, clock, monkeypatch, caplog, error
):
    def fail(*_):
        raise error

    monkeypatch.setattr(local, "RULES", [Rule("broken", ("reward",), "", 1, fail, fail)])
    monkeypatch.setattr(local, "write_report", fail)
    logs = write_run(tmp_path / "run") / "logs"
    trackers = Trackers(
        [HealthTracker(logs), ReportTracker(logs)]
    )  # whose logs have a row to look at already
    for step in range(2, 12):
        trackers.log(step, {"reward": 1.0})
        clock.now += 1000.0
    trackers.close()
    for message, what in zip(
        sorted(caplog.messages), ("the report", "the rules of health"), strict=True
    ):
        assert message.startswith(f"{what}: {type(error).__name__}")
        assert message.endswith("; disabled; training continues.")


def test_every_run_leaves_a_report_with_its_last_step(tmp_path):
    trackers = make_trackers(
        str(tmp_path), TrackingConfig(), {}, SingleProcess(), [], total_steps=2
    )
    trackers.log(1, {"reward": 1.0})
    report = tmp_path / "logs" / "report.html"
    first = report.read_text()
    trackers.log_samples(2, [{"sample": 0, "prompt": "p", "response": "r", "reward": 1.0}])
    trackers.log_tokens(2, [{"sample": 0, "texts": ["r"], "value": [0.25]}])
    trackers.log(2, {"reward": 2.0})
    assert report.read_text() == first, "half a minute has not passed"
    trackers.close()
    data = [
        json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
        for text in (first, report.read_text())
    ]
    assert [(found["running"], found["runs"][0]["last_step"]) for found in data] == [
        (True, 1),
        (False, 2),
    ]
    assert data[1]["runs"][0]["samples"][0]["tokens"]["value"] == [0.25]
