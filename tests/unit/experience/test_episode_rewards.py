"""Statistics over an agent's episodes are of whole rewards: by hand, for episodes of unequal turns."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.group_filters import useful_groups
from openppo.experience.measure import measure_signal
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import (
    Ending,
    Episode,
    FinishReason,
    Prompt,
    Sample,
    SingleProcess,
    segments_of,
)
from tests.samples import one_segment, with_last

RUNNING = {"normalize_reward": "running"}
BY_GROUP = {"normalize_reward": "group"}


def episode(
    turn_rewards: Sequence[float | None], scores: dict[str, float] | None = None, **options: Any
) -> Sample:
    """One token is read and two are sampled in each turn; None: the turn has no reward."""
    ids: list[int] = []
    actions: list[bool] = []
    rewards: list[float] = []
    ends: list[bool] = []
    for reward in turn_rewards:
        ids += [3, 5, 6]
        actions += [False, True, True]
        rewards += [0.0, 0.0, reward or 0.0]
        ends += [False, False, True]

    is_rewarded = any(reward is not None for reward in turn_rewards)
    return one_segment(
        token_ids=ids,
        action_mask=actions,
        log_probs=[-1.0 if is_action else 0.0 for is_action in actions],
        versions=[0 if is_action else -1 for is_action in actions],
        finish_reason=options.pop("finish_reason", FinishReason.STOP),
        prompt=Prompt("", [3]),
        group=options.pop("group", 0),
        scores=scores or {},
        token_rewards=rewards if is_rewarded else None,
        step_ends=ends if is_rewarded else None,
        episode=Episode([], options.pop("ending", Ending.COMPLETED), len(turn_rewards)),
        **options,
    )


def in_segments(*parts: Sample) -> Sample:
    """One sample with the segments of all ``parts``; the rest is of the last."""
    return replace(parts[-1], segments=segments_of(parts))


def experience_of(
    name: str, samples: list[Sample], **options: Any
) -> tuple[list[Any], dict[str, float]]:
    """Experience of each segment, without any model, and its metrics."""
    required = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "n_samples_per_prompt": 4}
    no_models = {"init_kl_coef": 0, "old_log_probs": "rollout"}
    config = from_options(
        TrainPPOConfig, **required, **no_models, advantage_estimator=name, **options
    )
    maker = ExperienceMaker(
        actor=lambda *_: None,
        critic=None,
        reference=None,
        config=config,
        comm=SingleProcess(),
        device=torch.device("cpu"),
        pad_token_id=0,
    )
    metrics = Metrics()
    return maker.make(Rollout(samples, metrics), metrics), metrics.reduced(SingleProcess())


def at_actions(field: str, samples: list[Sample], name: str, **options: Any) -> list[list[float]]:
    """A field of each segment's experience at the last action of each turn."""
    experiences, _ = experience_of(name, samples, **options)
    of_rows = [
        (experience.tensors()[field][0], torch.tensor(segment.action_mask))
        for experience, segment in zip(experiences, segments_of(samples), strict=True)
    ]
    return [values[actions][1::2].tolist() for values, actions in of_rows]


# Whole rewards 1, 0 and 0.5: mean 0.5, std (of n - 1) 0.5, std (of n) sqrt(1/6).
UNEQUAL = [[1.0, 0.0], [None, None, None], [0.5]]


def test_group_norm_gives_each_action_its_episodes_advantage():
    found = at_actions("advantages", [episode(rewards) for rewards in UNEQUAL], "group_norm")
    assert found == [pytest.approx([1.0, 1.0]), pytest.approx([-1.0] * 3), pytest.approx([0.0])]


def test_a_format_penalty_lowers_the_advantage_of_every_turn():
    whole = [0.9, 1.0, 0.0]
    samples = [episode([-0.1, 1.0]), episode([1.0]), episode([None, None, None])]
    found = at_actions("advantages", samples, "group_norm")
    expected = [(reward - statistics.fmean(whole)) / statistics.stdev(whole) for reward in whole]
    for row, advantage, n_turns in zip(found, expected, (2, 1, 3), strict=True):
        assert row == pytest.approx([advantage] * n_turns, abs=1e-6)
    assert found[0][0] < found[1][0], "the same success without a penalty is worth more"


def test_scores_and_rewards_of_turns_are_one_reward():
    samples = [
        episode([0.5, 0.5], {"won": 1.0}),
        episode([0.0], {"won": 1.0}),
        episode([None], {"won": 3.0}),
    ]
    whole = [2.0, 1.0, 3.0]
    found = at_actions("advantages", samples, "group_norm")
    for row, reward in zip(found, whole, strict=True):
        assert row == pytest.approx([reward - 2.0] * len(row), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "std"), [(BY_GROUP, 0.5), (RUNNING, math.sqrt(1 / 6))], ids=["group", "running"]
)
def test_normalizers_divide_turns_and_centre_the_score(options, std):
    found = at_actions("rewards", [episode(rewards) for rewards in UNEQUAL], "reinforce", **options)
    expected = [
        [1.0, -0.5],
        [0.0, 0.0, -0.5],
        [0.5 - 0.5],
    ]  # times 1 / std; the mean 0.5 is taken at the end
    assert found == [pytest.approx([reward / std for reward in row], abs=1e-6) for row in expected]


@pytest.mark.parametrize("options", [BY_GROUP, RUNNING], ids=["group", "running"])
def test_normalized_rewards_keep_the_order_of_whole_rewards(options):
    """A success after ten turns is better than a failure after one."""
    samples = [episode([0.0] * 9 + [1.0]), episode([0.0]), episode([0.0] * 3), episode([1.0])]
    sums = [sum(row) for row in at_actions("rewards", samples, "reinforce", **options)]
    assert sums[0] == pytest.approx(sums[3]) and sums[1] == pytest.approx(sums[2])
    assert sums[0] > 0 > sums[1]


@pytest.mark.parametrize("options", [BY_GROUP, RUNNING], ids=["group", "running"])
def test_clipping_bounds_the_normalized_whole_and_not_its_score(options):
    """Rewards of turns far from 0 leave a score of -500, which a bound of 10 must not cut."""
    samples = [episode([500.0], {"won": 1.0}), episode([500.0], {"won": 0.0})]
    sums = [sum(row) for row in at_actions("rewards", samples, "reinforce", **options)]
    deviation = statistics.stdev if options is BY_GROUP else statistics.pstdev
    std = deviation([501.0, 500.0])
    assert sums == pytest.approx([0.5 / std, -0.5 / std], abs=1e-3)


def test_remax_subtracts_the_greedy_episode_in_all_its_segments():
    greedy = in_segments(episode([0.5]), episode([0.25], {"won": 1.0}))  # 1.75 in all
    samples = [
        episode([1.0, 0.0], {"won": 1.0}, greedy=greedy),
        episode([None], {"won": 0.0}, greedy=greedy),
    ]
    assert at_actions("advantages", samples, "remax") == [
        pytest.approx([0.25] * 2),
        pytest.approx([-1.75]),
    ]

    std = math.sqrt(1.0 + 1e-8)  # of 2 and 0
    running = at_actions("advantages", samples, "remax", **RUNNING)
    assert running == [pytest.approx([0.25 / std] * 2), pytest.approx([-1.75 / std])]


def test_groups_of_agents_are_useful_by_whole_rewards_alone():
    alike = [episode([1.0, 0.0], group=1), episode([0.0, 1.0], group=1)]
    differ = [episode([1.0, 0.0], group=2), episode([None], group=2)]
    assert useful_groups([*alike, *differ], compares_steps=True, weights={}) == differ


def test_the_overlong_penalty_looks_at_the_longest_turn_of_all_segments():
    short = episode([None], {"won": 1.0})
    long = with_last(short, action_mask=[True] * 3)
    sample = in_segments(long, short)  # a turn of three tokens in the first, of two in the last
    options = {"overlong_buffer_len": 1, "generate_max_len": 3}
    _, metrics = experience_of("reinforce", [sample], **options)
    assert metrics["shaped_reward"] == 0.0, "1 less the whole penalty"


def test_the_overlong_penalty_counts_actions_that_are_too_old():
    sample = with_last(episode([None], {"won": 1.0}), trained_mask=[False, False, True])
    _, metrics = experience_of("reinforce", [sample], overlong_buffer_len=1, generate_max_len=2)
    assert metrics["shaped_reward"] == 0.0


@pytest.mark.parametrize("ending", [Ending.MAX_TURNS, Ending.EPISODE_LENGTH, Ending.CONTEXT_FULL])
def test_limits_of_an_episode_cut_no_answer_off(ending):
    options = {"missing_eos_penalty": 0.5, "overlong_filter": True}
    sample = episode([None], {"won": 1.0}, ending=ending, finish_reason=FinishReason.LENGTH)
    [experience], metrics = experience_of("reinforce", [sample], **options)
    assert metrics["truncated_fraction"] == 0.0 and metrics["shaped_reward"] == 1.0
    assert experience.action_mask.sum() == 2

    cut = episode([None], {"won": 1.0}, finish_reason=FinishReason.LENGTH)
    [experience], metrics = experience_of("reinforce", [cut], **options)
    assert metrics["truncated_fraction"] == 1.0 and metrics["shaped_reward"] == 0.5
    assert experience.action_mask.sum() == 0


def test_actions_that_are_too_old_are_scored_and_not_trained():
    trained_mask = [False] * 4 + [True, True]
    sample = with_last(episode([1.0, 2.0]), trained_mask=trained_mask)
    [experience], metrics = experience_of("reinforce", [sample])
    assert experience.action_mask[0].tolist() == trained_mask
    assert experience.returns[0].tolist() == [0.0] * 4 + [2.0, 2.0]
    assert metrics["reward"] == 3.0


def test_groups_whose_differing_rewards_teach_nothing_are_counted():
    samples = [episode([reward], group=group) for group in (1, 2, 3) for reward in (0.0, 1.0)]
    equal_rewards = samples[2].last.token_rewards
    samples[3] = with_last(samples[3], token_rewards=equal_rewards)  # in the second group
    advantages = torch.zeros(6, 3)
    advantages[5, 1] = 0.5  # the third group teaches something
    mask = torch.tensor([sample.last.action_mask for sample in samples])
    metrics = Metrics()
    measure_signal(samples, advantages, mask, weights={}, metrics=metrics)
    assert metrics.reduced(SingleProcess()) == {"groups_without_signal": 1.0}


def test_a_group_has_signal_if_any_segment_of_its_samples_has():
    samples = [in_segments(episode([reward]), episode([0.0])) for reward in (0.0, 1.0)]
    mask = torch.tensor([segment.action_mask for segment in segments_of(samples)])
    for row, n_without_signal in ((0, 0.0), (1, 0.0), (3, 0.0), (None, 1.0)):
        advantages = torch.zeros(4, 3)
        if row is not None:
            advantages[row, 2] = -0.5
        metrics = Metrics()
        measure_signal(samples, advantages, mask, weights={}, metrics=metrics)
        assert metrics.reduced(SingleProcess()) == {"groups_without_signal": n_without_signal}


def test_clipping_all_rewards_alike_shows_as_groups_without_signal():
    samples = [episode([None], {"won": score}, group=1) for score in (20.0, 30.0)]
    _, metrics = experience_of("group_norm", samples)
    assert metrics["groups_without_signal"] == 1.0
    _, metrics = experience_of("group_norm", samples, reward_clip_range=(-50.0, 50.0))
    assert metrics["groups_without_signal"] == 0.0
