"""The rule by which failed episodes end a run."""

import pickle

import pytest

from openppo.rollout.failures import GROUPS_IN_A_ROW, FailureCount, NothingTrainedError


def counted(*steps: str) -> FailureCount:
    """A count of steps whose groups failed (x) or have episodes to train on (o)."""
    count = FailureCount()
    for groups in steps:
        for number, group in enumerate(groups):
            count.add_group(f"error {number}" if group == "x" else None)
        count.end_step()
    return count


def test_ten_failed_groups_in_a_row_are_reported_across_steps() -> None:
    assert counted("oxxx", "xxxx", "xx").groups_message() is None
    assert counted("xxxx", "xxoxx", "xxxx", "xxx").groups_message() is None
    message = "10 groups of task sums in a row failed; the last: error 1"
    assert counted("oxxxx", "xxxx", "xx").groups_message("sums") == message
    assert (
        counted("x" * GROUPS_IN_A_ROW).groups_message()
        == "10 groups in a row failed; the last: error 9"
    )


@pytest.mark.parametrize(
    ("steps", "n_steps", "ends"),
    [
        (["xx"], 8, False),
        (["xx", "xx"], 8, True),
        (["xx", "ox", "xx"], 8, False),
        (["ox", "xx", "xx"], 8, True),
        (["xx"], 1, True),
        (["ox"], 1, False),
        (["ox"], 0, False),
        (["xx"], 0, False),
        (["xx", "xx"], 0, True),
    ],
)
def test_two_steps_without_a_trained_episode_are_reported(
    steps: list[str], n_steps: int, ends: bool
) -> None:
    message = counted(*steps).steps_message(n_steps)
    assert (message is not None) == ends
    assert message is None or message.endswith("could be trained on; the last error: error 1")


def test_steps_whose_groups_are_all_dropped_are_reported_with_the_reason() -> None:
    count = FailureCount()
    for _ in range(2):
        count.add_group(None)
        count.drop_groups("equal rewards")
        count.end_step()
    assert (
        count.steps_message(8)
        == "no episode of the last 2 steps could be trained on; the last error: equal rewards"
    )
    count = counted("xx")
    count.add_group("why")
    count.drop_groups("equal rewards")
    count.end_step()
    assert count.error == "why", "all failed: nothing was dropped"


def test_the_error_reaches_other_ranks_whole() -> None:
    error = pickle.loads(pickle.dumps(NothingTrainedError("why", ["stand-in"])))  # type: ignore[list-item]
    assert (str(error), error.failed) == ("why", ["stand-in"])
