"""Phases add up; ranks are combined as a step feels them."""

from __future__ import annotations

from typing import Any

import pytest

from openppo.tracking import PhaseTimer
from openppo.tracking import timers as timers_module
from openppo.types import SingleProcess


class OneOfTwo(SingleProcess):
    """``Comm`` whose other rank sends ``other``."""

    world_size = 2

    def __init__(self, other: Any) -> None:
        self.other = other

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the timers see: a list whose only entry a test sets."""
    now = [100.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    return now


def test_phases_accumulate_and_an_outer_phase_contains_its_inner_ones(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("step"):
        for seconds in (1.0, 2.0):
            with timer.phase("generation"):
                clock[0] += seconds
        clock[0] += 0.5
    assert timer.metrics(SingleProcess()) == {"time/generation_s": 3.0, "time/step_s": 3.5}


def test_speed_is_all_tokens_over_the_slowest_rank(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("generation"):
        clock[0] += 2.0
    timer.count_tokens("generation", 60)
    timer.count_tokens("generation", 40)
    other = ({"generation": 4.0, "saving": 1.0}, {"generation": 300}, {})
    assert timer.metrics(OneOfTwo(other)) == {
        "time/generation_s": 4.0,
        "time/saving_s": 1.0,
        "speed/generation_tokens_per_s": 100.0,
    }


def test_a_phase_that_fails_is_counted_and_can_run_again(clock: list[float]) -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("train"):
        clock[0] += 1.0
        raise KeyError
    with timer.phase("train"):
        clock[0] += 1.0
    assert timer.metrics(SingleProcess()) == {"time/train_s": 2.0}


def test_a_phase_inside_itself_is_refused_as_it_would_count_twice() -> None:
    timer = PhaseTimer()
    with pytest.raises(AssertionError, match="already running"), timer.phase("a"), timer.phase("a"):
        pass


def test_reset_forgets_seconds_and_tokens(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer.phase("train"):
        clock[0] += 1.0
    timer.count_tokens("train", 5)
    timer.reset()
    assert timer.metrics(SingleProcess()) == {}


class FakeCUDA:
    """What timers ask of ``torch.cuda``; ``hold`` allocates and frees so many GiB."""

    def __init__(self) -> None:
        self.peak = 0

    def hold(self, gib: int) -> None:
        self.peak = max(self.peak, gib << 30)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def synchronize(self) -> None: ...

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCUDA:
    fake = FakeCUDA()
    monkeypatch.setattr(timers_module.torch, "cuda", fake)
    return fake


def memory_of(timer: PhaseTimer, comm: SingleProcess) -> dict[str, float]:
    return {name: value for name, value in timer.metrics(comm).items() if name.startswith("memory/")}


def test_each_phase_has_its_own_peak_beside_the_estimate(cuda: FakeCUDA) -> None:
    timer = PhaseTimer(estimated={"generation": 3 << 30, "step": 9 << 29, "loading": 1 << 30})
    cuda.hold(50)  # while models were loaded
    with timer.phase("step"):
        for gib in (2, 4):
            with timer.phase("generation"):
                cuda.hold(gib)
        cuda.hold(6)
        with timer.phase("training"):
            cuda.hold(5)
    assert memory_of(timer, SingleProcess()) == {
        "memory/generation_peak_gib": 4.0,
        "memory/generation_estimated_gib": 3.0,
        "memory/training_peak_gib": 5.0,
        "memory/step_peak_gib": 6.0,
        "memory/step_estimated_gib": 4.5,
    }
    timer.reset()
    assert memory_of(timer, SingleProcess()) == {}


def test_the_peak_is_that_of_the_rank_that_took_most(cuda: FakeCUDA) -> None:
    timer = PhaseTimer()
    with timer.phase("training"):
        cuda.hold(5)
    assert memory_of(timer, OneOfTwo(({}, {}, {"training": 7 << 30}))) == {"memory/training_peak_gib": 7.0}


def test_a_phase_that_fails_leaves_its_peak_to_the_report(cuda: FakeCUDA) -> None:
    timer = PhaseTimer()
    with pytest.raises(MemoryError), timer.phase("step"), timer.phase("training"):
        cuda.hold(70)
        raise MemoryError
    assert cuda.max_memory_allocated() == 70 << 30


def test_tokens_without_measured_time_give_no_speed() -> None:
    timer = PhaseTimer()
    timer.count_tokens("train", 5)
    assert timer.metrics(SingleProcess()) == {}
