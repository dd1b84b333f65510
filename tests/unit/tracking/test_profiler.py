"""A trace has the chosen steps, names their phases, and stays small however long they last."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from openppo.config import TrackingConfig
from openppo.tracking import PhaseTimer, StepProfiler, progress_bar
from openppo.tracking.phase import begin_step, current

profiler_module = sys.modules[StepProfiler.__module__]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the profiler sees."""
    now = [0.0]
    monkeypatch.setattr(profiler_module.time, "monotonic", lambda: now[0])
    return now


def events_of(folder: Path, step: int) -> list[dict[str, Any]]:
    file = folder / "logs" / "profile" / f"step_{step:08d}_rank_0.json.gz"
    return [event for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if event.get("ph") == "X"]


def work(timer: PhaseTimer, steps: int, loops: int, clock: list[float]) -> None:
    """Steps of two phases, each with ``loops`` rounds of a second in which one matrix is multiplied."""
    matrix = torch.ones(2, 2)
    for step in range(1, steps + 1):
        begin_step(step)
        with timer.phase("step"):
            for name in ("generation", "training"):
                with timer.phase(name):
                    for _ in progress_bar(loops, name, enabled=False):
                        matrix.mm(matrix)
                        clock[0] += 1.0


def test_chosen_steps_are_recorded_with_their_phases_and_others_are_not(tmp_path: Path, clock: list[float]) -> None:
    work(PhaseTimer(StepProfiler(str(tmp_path), TrackingConfig(profile_steps="2,4"), rank=0)), 4, 1, clock)
    assert len(list((tmp_path / "logs" / "profile").iterdir())) == 2
    for step in (2, 4):
        names = [event["name"] for event in events_of(tmp_path, step)]
        assert [name for name in ("step", "generation", "training") if names.count(name) == 1] == [
            *("step", "generation", "training")
        ]
        assert names.count("aten::mm") == 2


def test_of_a_long_phase_the_first_seconds_are_recorded_and_its_name_spans_it_all(
    tmp_path: Path, clock: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    work(PhaseTimer(StepProfiler(str(tmp_path), TrackingConfig(profile_steps="1"), rank=0)), 1, 500, clock)
    events = events_of(tmp_path, 1)
    limit = profiler_module.RECORDED_SECONDS
    assert sum(event["name"] == "aten::mm" for event in events) == 2 * limit  # of a second each, in two phases
    ends = {event["name"]: event["ts"] + event["dur"] for event in events}
    begins = {event["name"]: event["ts"] for event in events}
    multiplied = [event["ts"] for event in events if event["name"] == "aten::mm"]
    assert begins["generation"] < multiplied[0] < ends["generation"] <= begins["training"] < ends["training"]
    assert capfd.readouterr().err == ""


def test_nothing_is_left_running_and_nothing_is_written_after_an_error(tmp_path: Path, clock: list[float]) -> None:
    timer = PhaseTimer(StepProfiler(str(tmp_path), TrackingConfig(profile_steps="1"), rank=0))
    begin_step(1)
    with pytest.raises(KeyError), timer.phase("step"), timer.phase("generation"):
        raise KeyError
    assert not (tmp_path / "logs").exists()
    assert current.on_progress is None
    work(timer, 1, 1, clock)
    assert len(events_of(tmp_path, 1)) > 0


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    with caplog.at_level(logging.WARNING, logger="openppo"):
        work(PhaseTimer(StepProfiler(str(tmp_path), TrackingConfig(profile_steps="1"), rank=0)), 2, 1, clock)
    (record,) = caplog.records
    assert "--profile_steps: no trace of step 1" in record.getMessage()


def test_without_chosen_steps_the_profiler_of_torch_is_not_touched(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "profiler", None)
    work(PhaseTimer(StepProfiler(str(tmp_path), TrackingConfig(), rank=0)), 2, 1, clock)
