"""Advantage estimators by hand, for groups in any order and of any size."""

import statistics
from typing import get_args

import pytest
import torch
from torch import Tensor

from openppo.config import AdvantageConfig, AdvantageEstimator, LossAggregation
from openppo.experience.estimators import ESTIMATORS, check_estimator

GROUPED = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"]
SCORES = torch.tensor([1.0, 4.0, 7.0, -2.0, 0.0])
GROUPS = torch.tensor([9, 3, 9, 3, 9])  # prompts of three and of two responses
GREEDY = torch.tensor([0.5, 2.0, 0.5, 2.0, 0.5])


def after_baseline(name: str, scores: Tensor = SCORES, groups: Tensor = GROUPS) -> list[float]:
    earned, steps = ESTIMATORS[name].rewards(scores, None, groups, GREEDY if name == "remax" else None)
    assert earned.dtype == scores.dtype
    assert steps is None
    return earned.tolist()


def naive(name: str, scores: list[float], groups: list[int]) -> list[float]:
    result = []
    for i, score in enumerate(scores):
        mine = [s for s, g in zip(scores, groups, strict=True) if g == groups[i]]
        others = [s for j, s in enumerate(scores) if groups[j] == groups[i] and j != i]
        mean = statistics.fmean(others if name == "rloo" else mine)
        result.append((score - mean) / (statistics.stdev(mine) + 1e-9 if name == "group_norm" else 1))
    return result


def test_every_name_of_the_option_has_an_estimator() -> None:
    assert set(ESTIMATORS) == set(get_args(AdvantageEstimator))
    assert {estimator.loss_agg for estimator in ESTIMATORS.values()} <= set(get_args(LossAggregation))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gae", [1, 4, 7, -2, 0]),
        ("reinforce", [1, 4, 7, -2, 0]),
        ("reinforce_baseline", [1 - 8 / 3, 3, 7 - 8 / 3, -3, -8 / 3]),
        ("dr_grpo", [1 - 8 / 3, 3, 7 - 8 / 3, -3, -8 / 3]),
        ("rloo", [1 - 3.5, 6, 7 - 0.5, -6, -4]),
        ("group_norm", [-0.4402255, 0.7071068, 1.1445863, -0.7071068, -0.7043608]),  # std 3.7859389 and 4.2426407
        ("remax", [0.5, 2, 6.5, -4, -0.5]),
    ],
)
def test_scores_after_the_baseline_by_hand(name: str, expected: list[float]) -> None:
    assert after_baseline(name) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", GROUPED)
def test_baselines_equal_a_loop_over_the_samples_for_many_groups(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = 100 * torch.randn(60, generator=generator, dtype=torch.float64)
    groups = torch.tensor([*range(8), *range(8), *torch.randint(0, 8, (44,), generator=generator)])
    groups = groups[torch.randperm(60, generator=generator)] * 1000 - 4000  # ids need not be small
    expected = naive(name, scores.tolist(), groups.tolist())
    assert after_baseline(name, scores, groups) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 1000])
def test_a_group_of_equal_rewards_has_no_advantage_at_all(name: str, score: float, size: int) -> None:
    # any rounding error would be divided by 1e-9
    assert after_baseline(name, torch.full((size,), score), torch.zeros(size).long()) == [0.0] * size


@pytest.mark.parametrize("name", ["rloo", "group_norm"])
def test_a_prompt_with_a_single_response_cannot_be_compared(name: str) -> None:
    with pytest.raises(ValueError, match=f"--advantage_estimator {name}.*single response.*--n_samples_per_prompt"):
        after_baseline(name, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("name", ["reinforce_baseline", "dr_grpo"])
def test_a_single_response_is_its_own_mean(name: str) -> None:
    assert after_baseline(name, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 0])) == [-1.5, 0.0, 1.5]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_no_trajectories_are_no_error(name: str) -> None:
    nothing = torch.zeros(0)
    assert len(ESTIMATORS[name].rewards(nothing, None, nothing.long(), nothing)[0]) == 0


@pytest.mark.parametrize("name", GROUPED)
def test_estimators_that_compare_demand_several_samples(name: str) -> None:
    with pytest.raises(ValueError, match=f"--advantage_estimator {name}.*--n_samples_per_prompt of at least 2"):
        check_estimator(name, 1)
    check_estimator(name, 2)


def test_the_others_do_with_one_sample_and_unknown_names_are_refused() -> None:
    for name in ("gae", "reinforce", "remax"):
        check_estimator(name, 1)
    with pytest.raises(ValueError, match="--advantage_estimator grpo does not exist; use one of .*gae"):
        check_estimator("grpo", 4)


MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]).bool()
REWARDS = torch.tensor([[9.0, 0.5, 0.25, 9.0, 2.0], [9.0, -1.0, 9.0, 9.0, 9.0]])
VALUES = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 0.5, 9.0, 9.0, 9.0]])


def computed(name: str, instead: float | None = None, **options: float) -> tuple[list, list]:
    estimator = ESTIMATORS[name]
    values = VALUES if estimator.uses_critic else None
    config = AdvantageConfig(**options)  # type: ignore[arg-type]
    advantages, returns = estimator.advantages(REWARDS, values, MASK, config, instead)
    return advantages[0].tolist(), returns[0].tolist()


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "remax"])
def test_without_a_critic_the_advantage_is_the_discounted_reward_to_go(name: str) -> None:
    advantages, returns = computed(name, gamma=0.5)
    assert advantages == returns == [0, 0.5 + 0.5 * (0.25 + 0.5 * 2), 0.25 + 0.5 * 2, 0, 2]


def test_with_a_critic_options_choose_the_lambdas() -> None:
    # gamma 1: deltas 0.5 + 2 - 1 = 1.5, 0.25 + 3 - 2 = 1.25, 2 - 3 = -1
    advantages, returns = computed("gae", lambd=0.8)
    assert advantages == pytest.approx([0, 1.5 + 0.8 * 0.45, 1.25 - 0.8, 0, -1])
    assert returns == pytest.approx([0, 2.86, 2.45, 0, 2])
    advantages, returns = computed("gae", lambd=0.8, lambd_critic=1.0)
    assert advantages == pytest.approx([0, 1.86, 0.45, 0, -1])
    assert returns == pytest.approx([0, 2.75, 2.25, 0, 2])  # Monte Carlo
    assert computed("gae", instead=1.0, lambd=0.8, lambd_critic=0.5)[1] == pytest.approx([0, 2.75, 2.25, 0, 2])
    advantages, returns = computed("gae", lambd=0.8, adaptive_lambd_alpha=1.0)  # lambda 2/3 for three actions
    assert advantages == pytest.approx([0, 1.5 + 2 / 3 * (1.25 - 2 / 3), 1.25 - 2 / 3, 0, -1])
    assert returns == pytest.approx([0, 2.86, 2.45, 0, 2])  # those of --lambd
