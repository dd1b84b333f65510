"""Rollouts: who samples what, whose scores go where, and which groups are worth training on."""

import contextlib

from openppo.types import Completion, FinishReason, Prompt, Score, Trajectory
from tests.unit.trainer.conftest import OneOf, trainer_of

PROMPTS = [Prompt(text=str(i), token_ids=[10 + i]) for i in range(5)]


def echo(_, prompt, seed, params):
    """The greedy response is the prompt and 0; a sampled one the prompt and a number made of its seed."""
    end = 0 if params.temperature == 0 else 1 + seed % 1000
    return Completion([*prompt, end], [-1.0] * (len(prompt) + 1), FinishReason.STOP)


def source_of(comm=None, estimator="gae", first_group=0, **options):
    options |= {"advantage_estimator": estimator, "n_samples_per_prompt": 2}
    trainer = trainer_of(echo, PROMPTS, PROMPTS[:3], lambda t: Score({"last": float(t.token_ids[-1])}), comm, **options)
    trainer.state.policy_version, trainer.source.consumed_prompts = 7, first_group
    return trainer.source


def test_groups_stay_together_and_are_the_same_for_any_number_of_ranks():
    alone = source_of(first_group=100).rollout(PROMPTS).unscored
    assert [t.group for t in alone] == [100, 100, 101, 101, 102, 102, 103, 103, 104, 104]
    assert len({tuple(t.response_ids) for t in alone}) == 10
    assert {version for t in alone for version in t.versions} == {-1, 7}
    for world in (2, 3, 4):
        sources = [source_of(OneOf(rank, world), first_group=100) for rank in range(world)]
        of_ranks = [source.rollout(PROMPTS).unscored for source in sources]
        assert [t for rank in of_ranks for t in rank] == alone
        assert sum(len({t.group for t in rank}) for rank in of_ranks) == 5


def test_the_greedy_response_is_sampled_once_per_prompt_and_scored_too():
    trajectories = list(source_of(estimator="remax").rollout(PROMPTS[:2]))
    greedy = [t.greedy for t in trajectories]
    assert [g.response_ids for g in greedy if g] == [[10, 0], [10, 0], [11, 0], [11, 0]]
    assert greedy[0] is greedy[1]
    assert [g.scores["last"] for g in greedy if g] == [0.0] * 4
    assert all(t.scores["last"] == t.token_ids[-1] > 0 for t in trajectories)
    assert source_of().rollout(PROMPTS[:1]).unscored[0].greedy is None


def test_evaluation_holds_the_weights_only_while_it_samples():
    source, seen = source_of(eval_n_samples_per_prompt=2), []

    @contextlib.contextmanager
    def with_weights(weights):
        seen.append("open")
        yield
        seen.append("closed")

    score = source.scorer.score
    source.engine.with_weights = with_weights
    source.scorer.score = lambda rows: seen.append("scored") or score(rows)
    responses = source.evaluate()
    assert seen == ["open", "closed", "scored"]
    assert [t.group for t in responses] == [0, 0, 1, 1, 2, 2]
    assert all(t.scores for t in responses)
    assert source.state_dict() == {"consumed_batches": 0, "consumed_prompts": 0}


def scored(group, *rewards):
    return [
        Trajectory([1, 2], [False, True], [0.0, -1.0], [-1, 0], FinishReason.STOP, PROMPTS[0], group, scores={"a": r})
        for r in rewards
    ]


def test_groups_with_one_reward_are_of_no_use_and_of_too_many_the_first_are_kept():
    mixed, same, other = scored(4, 0.0, 1.0), scored(2, 1.0, 1.0), scored(9, 0.5, 0.5)
    other[1].token_rewards = [0.0, 0.25]
    assert source_of().filter_groups([*mixed, *same, *other]) == [*mixed, *other]
    assert source_of().filter_groups([]) == []
    assert source_of(reward_weights=("a=0",)).filter_groups(mixed) == []
    unequal = scored(4, 1.0, 1.0)  # of use where steps are compared, though sums are equal
    for row in (*same, *unequal):
        row.token_ids, row.action_mask, row.token_rewards = [1, 2, 2], [False, True, True], [0.0, 0.5, 0.0]
    unequal[1].token_rewards = [0.0, 0.0, 0.5]
    assert source_of(estimator="group_norm").filter_groups([*same, *unequal]) == unequal
    assert source_of(estimator="rloo").filter_groups([*same, *unequal]) == []
    third, first, second = scored(7, 0.0, 1.0), scored(3, 0.0, 1.0), scored(5, 0.0, 1.0)
    assert source_of()._first_groups([*third, *first, *second]) == [*first, *second]
