"""The position is the innermost phase, and stays where an exception was raised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from openppo.tracking import PhaseTimer, progress_bar
from openppo.tracking.phase import begin_step, phase, position


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """Puts the position of this process back."""
    before = dict(vars(position))
    yield
    vars(position).update(before)


def test_the_innermost_phase_counts_and_the_outer_one_comes_back() -> None:
    timer = PhaseTimer()
    with timer.phase("step"):
        with timer.phase("training"):
            assert position.phase == "training"
        assert position.phase == "step"


def test_an_exception_leaves_the_phase_in_which_it_was_raised() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("step"), timer.phase("scoring"):
        raise KeyError
    assert position.phase == "scoring"


def test_a_function_can_be_a_phase_each_time_it_is_called() -> None:
    @phase("saving")
    def save() -> str:
        return position.phase

    outside = position.phase
    assert [save(), save()] == ["saving", "saving"]
    assert position.phase == outside


def test_phases_and_progress_are_signs_of_life_but_only_phases_count_as_being_farther() -> None:
    ticks, phases = position.ticks, position.phases
    for _ in progress_bar(3, "work", enabled=False):
        pass
    assert position.ticks == ticks + 3
    assert position.phases == phases
    with phase("saving"):
        assert position.phases == phases + 1
    assert position.phases == phases + 2
    assert position.ticks == ticks + 5


def test_a_step_that_begins_is_the_position() -> None:
    begin_step(7)
    assert position.step == 7
