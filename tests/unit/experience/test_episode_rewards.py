"""Statistics over an agent's episodes are of whole rewards: by hand, for episodes of unequal turns."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.group_filters import useful_groups
from openppo.experience.measure import measure_signal
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import Ending, Episode, FinishReason, Prompt, SingleProcess, Trajectory

RUNNING = {"normalize_reward": True, "reward_normalizer": "running"}
BY_GROUP = {"normalize_reward": True, "reward_normalizer": "group"}


def episode(
    turn_rewards: Sequence[float | None], scores: dict[str, float] | None = None, **more: Any
) -> Trajectory:
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
    return Trajectory(
        token_ids=ids,
        action_mask=actions,
        log_probs=[-1.0 if is_action else 0.0 for is_action in actions],
        versions=[0 if is_action else -1 for is_action in actions],
        finish_reason=more.pop("finish_reason", FinishReason.STOP),
        prompt=Prompt("", [3]),
        group=more.pop("group", 0),
        scores=scores or {},
        token_rewards=rewards if is_rewarded else None,
        step_ends=ends if is_rewarded else None,
        episode=Episode([], more.pop("ending", Ending.COMPLETED), len(turn_rewards)),
        **more,
    )


def experience_of(
    name: str, rows: list[Trajectory], **options: Any
) -> tuple[list[Any], dict[str, float]]:
    """Experience of each row, without any model, and its metrics."""
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
    return maker.make(Rollout(rows, metrics), metrics), metrics.reduced(SingleProcess())


def at_actions(field: str, rows: list[Trajectory], name: str, **options: Any) -> list[list[float]]:
    """A field of the experience at the last action of each turn."""
    made, _ = experience_of(name, rows, **options)
    of_rows = [
        (one.tensors()[field][0], torch.tensor(row.action_mask))
        for one, row in zip(made, rows, strict=True)
    ]
    return [values[actions][1::2].tolist() for values, actions in of_rows]


# Whole rewards 1, 0 and 0.5: mean 0.5, std (of n - 1) 0.5, std (of n) sqrt(1/6).
UNEQUAL = [[1.0, 0.0], [None, None, None], [0.5]]


def test_group_norm_gives_each_action_its_episodes_advantage():
    found = at_actions("advantages", [episode(rewards) for rewards in UNEQUAL], "group_norm")
    assert found == [pytest.approx([1.0, 1.0]), pytest.approx([-1.0] * 3), pytest.approx([0.0])]


def test_a_format_penalty_lowers_the_advantage_of_every_turn():
    whole = [0.9, 1.0, 0.0]
    rows = [episode([-0.1, 1.0]), episode([1.0]), episode([None, None, None])]
    found = at_actions("advantages", rows, "group_norm")
    expected = [(reward - statistics.fmean(whole)) / statistics.stdev(whole) for reward in whole]
    for row, advantage, n_turns in zip(found, expected, (2, 1, 3), strict=True):
        assert row == pytest.approx([advantage] * n_turns, abs=1e-6)
    assert found[0][0] < found[1][0], "the same success without a penalty is worth more"


def test_scores_and_rewards_of_turns_are_one_reward():
    rows = [
        episode([0.5, 0.5], {"won": 1.0}),
        episode([0.0], {"won": 1.0}),
        episode([None], {"won": 3.0}),
    ]
    whole = [2.0, 1.0, 3.0]
    found = at_actions("advantages", rows, "group_norm")
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
    rows = [episode([0.0] * 9 + [1.0]), episode([0.0]), episode([0.0] * 3), episode([1.0])]
    sums = [sum(row) for row in at_actions("rewards", rows, "reinforce", **options)]
    assert sums[0] == pytest.approx(sums[3]) and sums[1] == pytest.approx(sums[2])
    assert sums[0] > 0 > sums[1]


@pytest.mark.parametrize("options", [BY_GROUP, RUNNING], ids=["group", "running"])
def test_clipping_bounds_the_normalized_whole_and_not_its_score(options):
    """Rewards of turns far from 0 leave a score of -500, which a bound of 10 must not cut."""
    rows = [episode([500.0], {"won": 1.0}), episode([500.0], {"won": 0.0})]
    sums = [sum(row) for row in at_actions("rewards", rows, "reinforce", **options)]
    deviation = statistics.stdev if options is BY_GROUP else statistics.pstdev
    std = deviation([501.0, 500.0])
    assert sums == pytest.approx([0.5 / std, -0.5 / std], abs=1e-3)


def test_remax_subtracts_the_greedy_episode_in_all_its_parts():
    played = Episode([], Ending.COMPLETED, 2)
    first, second = episode([0.5]), episode([0.25], {"won": 1.0})
    first.scores = {"won": 1.0}
    first.episode = second.episode = played
    greedy = (first, second)  # 1.75 in all
    rows = [
        episode([1.0, 0.0], {"won": 1.0}, greedy=greedy),
        episode([None], {"won": 0.0}, greedy=greedy),
    ]
    assert at_actions("advantages", rows, "remax") == [
        pytest.approx([0.25] * 2),
        pytest.approx([-1.75]),
    ]

    std = math.sqrt(1.0 + 1e-8)  # of 2 and 0
    running = at_actions("advantages", rows, "remax", **RUNNING)
    assert running == [pytest.approx([0.25 / std] * 2), pytest.approx([-1.75 / std])]


def test_groups_of_agents_are_useful_by_whole_rewards_alone():
    alike = [episode([1.0, 0.0], group=1), episode([0.0, 1.0], group=1)]
    differ = [episode([1.0, 0.0], group=2), episode([None], group=2)]
    assert useful_groups([*alike, *differ], compares_steps=True, weights={}) == differ


def test_the_overlong_penalty_looks_at_the_longest_turn_of_all_parts():
    played = Episode([], Ending.COMPLETED, 2)
    long, short = episode([None], {"won": 1.0}), episode([None], {"won": 1.0})
    long.action_mask[0] = True  # a turn of three tokens in the first part, of two in the last
    long.episode = short.episode = played
    options = {"overlong_buffer_len": 1, "generate_max_len": 3}
    _, metrics = experience_of("reinforce", [long, short], **options)
    assert metrics["shaped_reward"] == 0.0, "1 less the whole penalty"


def test_the_overlong_penalty_counts_actions_that_are_too_old():
    row = episode([None], {"won": 1.0})
    row.trained_mask = [False, False, True]
    _, metrics = experience_of("reinforce", [row], overlong_buffer_len=1, generate_max_len=2)
    assert metrics["shaped_reward"] == 0.0


@pytest.mark.parametrize("ending", [Ending.MAX_TURNS, Ending.EPISODE_LENGTH, Ending.CONTEXT_FULL])
def test_limits_of_an_episode_cut_no_answer_off(ending):
    row = episode([None], {"won": 1.0}, ending=ending, finish_reason=FinishReason.LENGTH)
    made, metrics = experience_of("reinforce", [row], missing_eos_penalty=0.5, overlong_filter=True)
    assert metrics["truncated_fraction"] == 0.0 and metrics["shaped_reward"] == 1.0
    assert made[0].action_mask.sum() == 2

    cut = episode([None], {"won": 1.0}, finish_reason=FinishReason.LENGTH)
    made, metrics = experience_of("reinforce", [cut], missing_eos_penalty=0.5, overlong_filter=True)
    assert metrics["truncated_fraction"] == 1.0 and metrics["shaped_reward"] == 0.5
    assert made[0].action_mask.sum() == 0


def test_actions_that_are_too_old_are_scored_and_not_trained():
    row = episode([1.0, 2.0])
    row.trained_mask = [False] * 4 + [True, True]
    made, metrics = experience_of("reinforce", [row])
    assert made[0].action_mask[0].tolist() == row.trained_mask
    assert made[0].returns[0].tolist() == [0.0] * 4 + [2.0, 2.0]
    assert metrics["reward"] == 3.0


def test_groups_whose_differing_rewards_teach_nothing_are_counted():
    rows = [episode([reward], group=group) for group in (1, 2, 3) for reward in (0.0, 1.0)]
    rows[3].token_rewards = rows[2].token_rewards  # the second group's rewards are equal
    advantages = torch.zeros(6, 3)
    advantages[5, 1] = 0.5  # the third group teaches something
    mask = torch.tensor([row.action_mask for row in rows])
    metrics = Metrics()
    measure_signal(rows, advantages, mask, weights={}, metrics=metrics)
    assert metrics.reduced(SingleProcess()) == {"groups_without_signal": 1.0}


def test_clipping_all_rewards_alike_shows_as_groups_without_signal():
    rows = [episode([None], {"won": score}, group=1) for score in (20.0, 30.0)]
    _, metrics = experience_of("group_norm", rows)
    assert metrics["groups_without_signal"] == 1.0
    _, metrics = experience_of("group_norm", rows, reward_clip_range=(-50.0, 50.0))
    assert metrics["groups_without_signal"] == 0.0
