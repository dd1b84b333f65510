"""Advantage estimators by hand, for groups in any order and of any size."""

from typing import get_args

import pytest
import torch

from openppo.config import AdvantageConfig, AdvantageEstimator, LossAggregation
from openppo.config.ppo import GROUP_ESTIMATORS
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.token_rewards import StepRewards

SCORES = torch.tensor([1.0, 4.0, 7.0, -2.0, 0.0])
GROUPS = torch.tensor([9, 3, 9, 3, 9])  # prompts of three and of two responses
GREEDY = torch.tensor([0.5, 2.0, 0.5, 2.0, 0.5])


def after_baseline(name, scores=SCORES, groups=GROUPS, greedy=GREEDY):
    """Of responses without rewards of steps."""
    no_steps = StepRewards(torch.zeros(len(scores), 1), torch.zeros(len(scores), 1).bool())
    earned, steps = ESTIMATORS[name].rewards(
        scores, no_steps, groups, greedy if name == "remax" else None
    )
    assert earned.dtype == scores.dtype
    assert steps is None or not steps.any()
    return earned.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", [1, 4, 7, -2, 0]),
        ("reinforce", [1, 4, 7, -2, 0]),
        ("reinforce_baseline", [1 - 8 / 3, 3, 7 - 8 / 3, -3, -8 / 3]),
        ("dr_grpo", [1 - 8 / 3, 3, 7 - 8 / 3, -3, -8 / 3]),
        ("rloo", [1 - 3.5, 6, 7 - 0.5, -6, -4]),
        (
            "group_norm",
            [-0.4402255, 0.7071068, 1.1445863, -0.7071068, -0.7043608],
        ),  # std 3.7859389 and 4.2426407
        ("remax", [0.5, 2, 6.5, -4, -0.5]),
    ],
)
def test_scores_after_the_baseline_by_hand(name, expected):
    assert after_baseline(name) == pytest.approx(expected, abs=1e-6)
    assert after_baseline(name, torch.zeros(0), torch.zeros(0).long(), torch.zeros(0)) == []


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(name, score):
    for size in (2, 3, 7, 1000):  # any rounding error would be divided by 1e-9
        assert (
            after_baseline(name, torch.full((size,), score), torch.zeros(size).long())
            == [0.0] * size
        )


def test_a_single_response_is_its_own_mean_and_cannot_be_compared_with_others():
    alone = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])
    for name in ("reinforce_baseline", "dr_grpo"):
        assert after_baseline(name, *alone) == [-1.5, 0.0, 1.5]
    for name in ("rloo", "group_norm"):
        with pytest.raises(
            ValueError,
            match=f"--advantage_estimator {name}.*single response.*--n_samples_per_prompt",
        ):
            after_baseline(name, *alone)


def test_names_of_the_option_are_those_of_estimators():
    assert set(ESTIMATORS) == set(get_args(AdvantageEstimator)) >= set(GROUP_ESTIMATORS)
    comparing = {name for name, estimator in ESTIMATORS.items() if estimator.compares_responses}
    assert comparing == set(GROUP_ESTIMATORS)
    assert {estimator.loss_agg for estimator in ESTIMATORS.values()} <= set(
        get_args(LossAggregation)
    )


MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]).bool()
REWARDS = torch.tensor([[9.0, 0.5, 0.25, 9.0, 2.0], [9.0, -1.0, 9.0, 9.0, 9.0]])
VALUES = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 0.5, 9.0, 9.0, 9.0]])


def computed(name, instead=None, **options):
    values = VALUES if ESTIMATORS[name].uses_critic else None
    found = ESTIMATORS[name].advantages(REWARDS, values, MASK, AdvantageConfig(**options), instead)
    return [x[0].tolist() for x in found]


@pytest.mark.parametrize("name", ["reinforce", "remax", *GROUP_ESTIMATORS])
def test_without_a_critic_the_advantage_is_the_discounted_reward_to_go(name):
    advantages, returns = computed(name, gamma=0.5)
    assert advantages == returns == [0, 0.5 + 0.5 * (0.25 + 0.5 * 2), 0.25 + 0.5 * 2, 0, 2]


@pytest.mark.parametrize(
    ("options", "advantages", "returns"),
    [  # gamma 1: deltas 0.5 + 2 - 1 = 1.5, 0.25 + 3 - 2 = 1.25, 2 - 3 = -1
        ({}, [0, 1.86, 0.45, 0, -1], [0, 2.86, 2.45, 0, 2]),
        ({"lambd_critic": 1.0}, [0, 1.86, 0.45, 0, -1], [0, 2.75, 2.25, 0, 2]),  # Monte Carlo
        ({"lambd_critic": 0.5, "instead": 1.0}, [0, 1.86, 0.45, 0, -1], [0, 2.75, 2.25, 0, 2]),
        (  # lambda 2/3 for three actions; returns are those of --lambd
            {"adaptive_lambd_alpha": 1.0},
            [0, 1.5 + 2 / 3 * (1.25 - 2 / 3), 1.25 - 2 / 3, 0, -1],
            [0, 2.86, 2.45, 0, 2],
        ),
    ],
)
def test_with_a_critic_options_choose_the_lambdas(options, advantages, returns):
    assert computed("gae", lambd=0.8, **options) == [
        pytest.approx(advantages),
        pytest.approx(returns),
    ]
