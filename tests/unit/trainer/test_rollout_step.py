"""Rollouts: who samples what, whose scores go where, and which groups are worth training on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ESTIMATORS
from openppo.trainer.steps.rollout_step import RolloutStep
from openppo.types import Completion, FinishReason, NeverStops, Prompt, SamplingParams, Score, SingleProcess, Trajectory

Comm = Callable[[int, int], Any]


class EchoEngine:
    """The greedy response is the prompt and 0; a sampled one the prompt and a number made of its seed."""

    version = 3

    def awake(self, weights: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        last = [0 if params.temperature == 0 else 1 + seed % 1000 for seed in seeds]
        return [
            Completion([*prompt, end], [-1.0] * (len(prompt) + 1), FinishReason.STOP)
            for prompt, end in zip(prompts, last, strict=True)
        ]


class Strategy:
    """As much of a strategy as rollouts see; counts how often weights were gathered."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.n_gathered = 0

    @contextlib.contextmanager
    def for_generation(self, engine: Any, in_lockstep: bool) -> Iterator[None]:
        self.n_gathered += not in_lockstep
        yield


class Actor:
    def train(self, mode: bool) -> None:
        assert not mode


class LastTokenScorer:
    """A trajectory earns its last token as "number", and 1 as "one"."""

    collective = True

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score({"number": float(t.token_ids[-1]), "one": 1.0}) for t in trajectories]


PROMPTS = [Prompt(text=str(i), token_ids=[10 + i]) for i in range(5)]


def step_of(comm: Any = None, estimator: str = "gae", **options: Any) -> RolloutStep:
    config = from_options(
        TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py", n_samples_per_prompt=2, **options
    )
    parts: Any = SimpleNamespace(
        strategy=Strategy(comm or SingleProcess()),
        actor=Actor(),
        engine=EchoEngine(),
        scorer=LastTokenScorer(),
        maker=SimpleNamespace(estimator=ESTIMATORS[estimator]),
        stop=NeverStops(),
    )
    return RolloutStep(config, parts)


def test_groups_stay_together_and_are_the_same_for_any_number_of_ranks(rank_of: Comm) -> None:
    alone = step_of().sample(PROMPTS, first_group=100)
    assert [t.group for t in alone] == [100, 100, 101, 101, 102, 102, 103, 103, 104, 104]
    assert len({tuple(t.response_ids) for t in alone}) == 10
    for world in (2, 3, 4):
        of_ranks = [step_of(rank_of(rank, world)).sample(PROMPTS, first_group=100) for rank in range(world)]
        assert [t for rank in of_ranks for t in rank] == alone
        groups = [{t.group for t in rank} for rank in of_ranks]
        assert sum(map(len, groups)) == 5


def test_the_greedy_response_is_sampled_once_per_prompt_and_scored_too() -> None:
    step = step_of(estimator="remax")
    trajectories = step.sample(PROMPTS[:2], first_group=0)
    step.start_scoring(trajectories)()
    greedy = [t.greedy for t in trajectories]
    assert [g.response_ids for g in greedy if g] == [[10, 0], [10, 0], [11, 0], [11, 0]]
    assert greedy[0] is greedy[1]
    assert [g.scores["number"] for g in greedy if g] == [0.0] * 4
    assert all(t.scores["number"] == t.token_ids[-1] > 0 for t in trajectories)
    assert step_of().sample(PROMPTS[:1], first_group=0)[0].greedy is None


def test_scores_are_written_when_they_are_waited_for() -> None:
    step = step_of()
    trajectories = step.sample(PROMPTS, first_group=0)
    wait = step.start_scoring(trajectories)
    assert trajectories[0].scores == {}
    wait()
    assert [t.scores["number"] for t in trajectories] == [t.token_ids[-1] for t in trajectories]


def test_a_weight_for_a_reward_that_does_not_exist_is_an_error() -> None:
    step = step_of(reward_weights=("nmber=2",))
    with pytest.raises(ValueError, match="--reward_weights names nmber, but the rewards are number, one"):
        step.start_scoring(step.sample(PROMPTS, first_group=0))()


def scored(group: int, *rewards: float) -> list[Trajectory]:
    return [
        Trajectory([1, 2], [False, True], [0.0, -1.0], [-1, 0], FinishReason.STOP, PROMPTS[0], group, scores={"a": r})
        for r in rewards
    ]


def test_groups_with_one_reward_are_of_no_use() -> None:
    mixed, same, other = scored(4, 0.0, 1.0), scored(2, 1.0, 1.0), scored(9, 0.5, 0.5)
    other[1].token_rewards = [0.0, 0.25]
    step = step_of()
    assert step.useful([*mixed, *same, *other]) == [*mixed, *other]
    assert step.useful([]) == []
    weightless = step_of(reward_weights=("a=0",))
    assert weightless.useful(mixed) == []


def test_unequal_steps_are_of_use_though_sums_are_equal() -> None:
    same, unequal = scored(2, 1.0, 1.0), scored(4, 1.0, 1.0)
    for row in (*same, *unequal):
        row.token_ids, row.action_mask, row.token_rewards = [1, 2, 2], [False, True, True], [0.0, 0.5, 0.0]
    unequal[1].token_rewards = [0.0, 0.0, 0.5]
    assert step_of(estimator="group_norm").useful([*same, *unequal]) == unequal
    assert step_of(estimator="rloo").useful([*same, *unequal]) == []


def test_of_too_many_groups_the_first_of_the_run_are_kept() -> None:
    step = step_of(rollout_batch_size=2)
    third, first, second = scored(7, 0.0, 1.0), scored(3, 0.0, 1.0), scored(5, 0.0, 1.0)
    assert step.count_groups([*third, *first, *second]) == 3
    assert step.first_groups([*third, *first, *second]) == [*first, *second]
