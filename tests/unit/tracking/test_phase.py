"""Phases add up and ranks combine; a trace names its phases and holds the whole of them."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from openppo.config import TrackingConfig
from openppo.tracking import PhaseTimer, StepProfiler, phase, progress_bar
from openppo.tracking.phase import current
from openppo.types import Interrupted, SingleProcess
from tests.ranks import on_ranks


class FakeCUDA:
    """The part of ``torch.cuda`` that timers use; ``hold`` allocates and frees so many GiB."""

    peak = 0

    def hold(self, gib: int) -> None:
        self.peak = max(self.peak, gib << 30)

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = 0

    is_available = is_initialized = synchronize = lambda self: True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restores the current phase of this process."""
    before, current.phase, current.seconds = dict(vars(current)), "starting", {}
    yield
    vars(current).update(before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of timers and profiler, a list whose only entry a test sets."""
    now = [100.0]
    monkeypatch.setattr(phase.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(phase.time, "monotonic", lambda: now[0])
    return now


def test_phases_accumulate_and_an_outer_phase_contains_its_inner_ones(clock):
    timer = PhaseTimer()
    with timer.phase("step"):
        for seconds in (1.0, 2.0):
            with timer.phase("generation"):
                clock[0] += seconds
        clock[0] += 0.5
    timer.count_tokens("generation", 6)
    timer.count_tokens("never", 5)  # no measured time, no speed
    timer.count_tokens("step", 3)  # of one rank alone
    other = PhaseTimer()
    with pytest.raises(KeyError), other.phase("generation"):
        clock[0] += 4.0  # of the slowest rank; a phase that fails counts too
        raise KeyError
    other.count_tokens("generation", 10)
    expected = {"time/generation_s": 4.0, "time/step_s": 3.5, "speed/generation_tokens_per_s": 4.0}
    expected |= {
        "speed/step_tokens_per_s": 3 / 3.5,
        "speed/generation_imbalance": 0.25,
        "speed/step_imbalance": 1.0,
    }
    expected["speed/step_tokens_per_s_per_device"] = 3 / 3.5 / 5  # three more ranks sample
    assert (
        on_ranks(2, lambda comm: (timer, other)[comm.rank].take_metrics(comm, others=3))
        == [expected] * 2
    )
    assert timer.take_metrics(SingleProcess()) == {}
    with pytest.raises(AssertionError, match="already running"), timer.phase("a"), timer.phase("a"):
        pass


def test_roles_add_up_and_an_evaluation_counts_as_a_whole(clock):
    class Trainer:
        comm = SingleProcess()

        @phase.evaluation
        def evaluate(self, found):
            with phase.timed("sync"), phase.timed("reward_model"):
                clock[0] += 2.0
            return found

    timer, trainer = PhaseTimer(), Trainer()
    with timer.phase("experience"):
        for seconds in (1.0, 0.5):
            with phase.timed("actor_forward"):
                clock[0] += seconds
    with phase.phase("saving"):
        clock[0] += 8.0
    expected = {"time/experience_s": 1.5, "time/actor_forward_s": 1.5, "time/saving_s": 8.0}
    assert timer.take_metrics(trainer.comm) == expected
    assert trainer.evaluate({"eval_reward": 1.0}) == {"eval_reward": 1.0, "time/evaluation_s": 2.0}
    assert trainer.evaluate({}) == {}, "nothing was evaluated"
    with pytest.raises(KeyError), phase.timed("actor_training"):
        raise KeyError
    assert timer.take_metrics(trainer.comm) == {}, "all of it has been reported"


@pytest.mark.parametrize(
    ("error", "left"), [(Interrupted("SIGTERM"), "starting"), (KeyError(), "evaluation")]
)
def test_an_evaluation_that_fails_leaves_the_next_as_it_is(clock, error, left):
    class Trainer:
        comm = SingleProcess()

        @phase.evaluation
        def evaluate(self, error):
            clock[0] += 2.0
            if error:
                raise error
            return {"eval_reward": 1.0}

    with pytest.raises(type(error)):
        Trainer().evaluate(error)
    assert current.phase == left
    assert Trainer().evaluate(None) == {"eval_reward": 1.0, "time/evaluation_s": 2.0}


def test_roles_are_timed_in_the_queue_of_a_gpu(monkeypatch):
    """Nothing waits until the times are reported."""
    queue: list[object] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            queue.append(self)

        def synchronize(self):
            queue.append("wait")

        def elapsed_time(self, end):
            return 250.0 * (queue.index(end) - queue.index(self))

    cuda: Any = FakeCUDA()
    cuda.Event, cuda.synchronize = Event, None
    monkeypatch.setattr(phase.torch, "cuda", cuda)
    for _ in range(2):
        with phase.timed("actor_forward"):
            queue.append("forward")
    assert "wait" not in queue and len(queue) == 6
    assert current.take_seconds() == {"actor_forward": 1.0} and queue[6:] == ["wait"] * 2
    assert current.take_seconds() == {}


def test_each_phase_has_its_own_peak_beside_the_estimate(monkeypatch):
    cuda = FakeCUDA()
    monkeypatch.setattr(phase.torch, "cuda", cuda)
    timer, other = (
        PhaseTimer(estimated={"generation": 3 << 30, "step": 9 << 29, "loading": 1 << 30}),
        PhaseTimer(),
    )
    cuda.hold(50)  # while models were loaded
    with timer.phase("step"):
        for gib in (2, 4):
            with timer.phase("generation"):
                cuda.hold(gib)
        cuda.hold(6)
        with timer.phase("training"):
            cuda.hold(5)
    with other.phase("training"):
        cuda.hold(7)
    found = on_ranks(2, lambda comm: (timer, other)[comm.rank].take_metrics(comm))[0]
    assert {name: value for name, value in found.items() if name.startswith("memory/")} == {
        **{"memory/generation_peak_gib": 4.0, "memory/generation_estimated_gib": 3.0},
        **{"memory/step_peak_gib": 6.0, "memory/step_estimated_gib": 4.5},
        "memory/training_peak_gib": 7.0,  # of the other rank
    }
    with pytest.raises(KeyError), timer.phase("train"):
        cuda.hold(70)
        raise KeyError
    assert cuda.max_memory_allocated() == 70 << 30, "for the report"


def test_the_innermost_phase_is_current_and_all_that_happens_is_progress(monkeypatch):
    timer, seen = PhaseTimer(), []
    monkeypatch.setattr(current, "progress", lambda: seen.append((current.phase, current.step)))
    with timer.step(7):
        with timer.phase("training"):
            for _ in progress_bar(2, "work", enabled=False):
                pass
        phase.phase("saving")(lambda: None)()
    assert seen == [
        (name, 7) for name in ("step", *["training"] * 3, "step", "saving", "step", "starting")
    ]
    with pytest.raises(KeyError), timer.phase("step"), timer.phase("scoring"):
        raise KeyError
    assert current.phase == "scoring", "for the report"


def profiled(folder: Path) -> PhaseTimer:
    """A timer of a run with ``--profile_steps 1``."""
    return PhaseTimer(StepProfiler(str(folder), TrackingConfig(profile_steps="1"), rank=0).phase)


def events_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "logs" / "profile" / "step_00000001_rank_0.json.gz"
    return [
        event
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    ]


def work(timer: PhaseTimer, steps: int, loops: int, clock: list[float]) -> None:
    """Steps of two phases, each with ``loops`` rounds of a second in which one matrix is multiplied."""
    matrix = torch.ones(2, 2)
    for step in range(1, steps + 1):
        with timer.step(step):
            for name in ("generation", "training"):
                with timer.phase(name):
                    for _ in progress_bar(loops, name, enabled=False):
                        matrix.mm(matrix)
                        clock[0] += 1.0


def test_a_chosen_step_is_recorded_whole_under_the_names_of_its_phases(tmp_path, clock):
    work(profiled(tmp_path), 2, 500, clock)
    events = events_of(tmp_path)
    multiplied = [event["ts"] for event in events if event["name"] == "aten::mm"]
    assert len(multiplied) == 2 * 500
    ends = {event["name"]: event["ts"] + event["dur"] for event in events}
    begins = {event["name"]: event["ts"] for event in events}
    assert (
        begins["generation"]
        < multiplied[0]
        < multiplied[499]
        < ends["generation"]
        <= begins["training"]
        < multiplied[500]
        < multiplied[-1]
        < ends["training"]
    )


def test_a_trace_prints_nothing_but_our_line(tmp_path):
    """In a process of its own: torch reads once how much it says, for whatever uses its profiler first."""
    program = f"""
import torch
from openppo.config import TrackingConfig
from openppo.tracking import PhaseTimer, StepProfiler
timer = PhaseTimer(StepProfiler({str(tmp_path)!r}, TrackingConfig(profile_steps="1"), 0).phase)
with timer.step(1):
    torch.ones(2)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert len(events_of(tmp_path)) > 0
    assert [line for line in ended.stderr.splitlines() if not line.startswith("[openppo]")] == []


def test_nothing_is_left_running_after_an_error_or_on_a_full_disk(tmp_path, clock, caplog):
    timer = profiled(tmp_path)
    current.step = 1
    with pytest.raises(KeyError), timer.phase("step"), timer.phase("generation"):
        raise KeyError
    assert not (tmp_path / "logs").exists()
    work(timer, 1, 1, clock)
    assert len(events_of(tmp_path)) > 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").write_text("a file")
    work(profiled(tmp_path / "other"), 2, 1, clock)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().startswith("--profile_steps: no trace of step 1")
