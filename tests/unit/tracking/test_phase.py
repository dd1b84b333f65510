"""The current phase is the innermost one, and stays where an exception was raised."""

from collections.abc import Iterator

import pytest

from openppo.tracking import PhaseTimer, progress_bar
from openppo.tracking.phase import begin_step, current, phase


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restores the current phase of this process."""
    before = dict(vars(current))
    yield
    vars(current).update(before)


def test_the_innermost_phase_is_current_until_it_ends() -> None:
    timer = PhaseTimer()
    with timer.phase("step"):
        with timer.phase("training"):
            assert current.phase == "training"
        assert current.phase == "step"


def test_an_exception_keeps_the_phase_in_which_it_was_raised() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("step"), timer.phase("scoring"):
        raise KeyError
    assert current.phase == "scoring"


def test_a_decorated_function_is_a_phase_at_each_call() -> None:
    @phase("saving")
    def save() -> str:
        return current.phase

    outside = current.phase
    assert [save(), save()] == ["saving", "saving"]
    assert current.phase == outside


def test_phases_and_progress_bars_are_progress() -> None:
    seen: list[float] = []
    current.on_progress = lambda: seen.append(current.last_progress)
    for _ in progress_bar(3, "work", enabled=False):
        pass
    with phase("saving"):
        pass
    assert len(seen) == 5
    assert seen == sorted(seen)


def test_the_step_is_the_one_that_began_last() -> None:
    begin_step(7)
    assert current.step == 7
