"""Weights of rewards must name rewards that there are, on any rank, as soon as samples can tell."""

from dataclasses import replace

import pytest

from openppo.experience.reward_names import RewardNames
from openppo.types import Ending, Episode, SingleProcess
from tests.ranks import on_ranks
from tests.samples import with_last

END = 2
UNKNOWN = "--reward_weights names short, but the rewards are right. Use their names."


@pytest.fixture
def played(make_sample):
    """Builds an episode that ended so, with rewards by name."""

    def make(ending, task="", **scores):
        sample = make_sample([5], [6, END], **scores)
        return replace(
            sample, episode=Episode([], ending, 1, "", ""), prompt=replace(sample.prompt, task=task)
        )

    return make


def names(*weights):
    return RewardNames(dict.fromkeys(weights, 2.0), SingleProcess())


def test_a_weight_of_a_reward_that_no_sample_has_is_refused(make_sample, played):
    for sample in (make_sample([5], [6, END], right=1.0), played(Ending.COMPLETED, right=1.0)):
        names("right").check([sample])
        with pytest.raises(ValueError, match=UNKNOWN):
            names("right", "short").check([sample])


def test_with_rewards_of_tokens_any_weight_may_be_meant(make_sample):
    names("short").check(
        [with_last(make_sample([5], [6, END], right=1.0), token_rewards=[0.0, 0.25, 0.0])]
    )


def test_the_name_of_pass_on_is_compared_too(make_sample):
    sample = with_last(make_sample([5], [6, END], right=1.0), token_rewards=[0.0, 0.25, 0.0])
    RewardNames({}, SingleProcess(), "right").check([sample])
    with pytest.raises(
        ValueError, match="--pass_on names prm, but the rewards are right. Use their names."
    ):
        RewardNames({}, SingleProcess(), "prm").check([sample])


def test_a_name_on_one_rank_is_known_to_all(make_sample):
    def check(comm, weights):
        scores = {"right": 1.0} if comm.rank == 1 else {}
        samples = [make_sample([5], [6, END], **scores)] if scores else []
        RewardNames(weights, comm).check(samples)

    assert on_ranks(3, lambda comm: check(comm, {"right": 2.0})) == [None] * 3
    said = on_ranks(3, lambda comm: check(comm, {"right": 2.0, "short": 2.0}))
    assert list(map(str, said)) == [UNKNOWN] * 3


def test_batches_without_a_complete_episode_refuse_nothing(played):
    compared = names("right", "short")
    for samples in (
        [],
        [played(Ending.MAX_TURNS, reward=0.0)],
        [played(Ending.AGENT_ERROR, reward=0.0)],
    ):
        compared.check(samples)
    compared.check([played(Ending.COMPLETED, right=1.0, short=0.0)])
    compared.check([played(Ending.COMPLETED, right=1.0)])  # once in a run


def test_a_task_may_come_later_and_a_name_of_none_is_a_warning(played, caplog):
    compared = names("right", "short")
    for _ in range(9):
        compared.check([played(Ending.COMPLETED, "sums", right=1.0)])
    compared.check([played(Ending.COMPLETED, "talk", short=1.0)])
    assert caplog.messages == []
    compared = names("right", "short")
    for _ in range(12):
        compared.check([played(Ending.COMPLETED, "sums", right=1.0)])
    assert caplog.messages == [UNKNOWN]
