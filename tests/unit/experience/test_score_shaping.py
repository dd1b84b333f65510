"""Penalties, filters and running moments, worked out by hand."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from openppo.config import RewardShapingConfig
from openppo.experience.token_rewards import (
    RunningMoments,
    one_reward_groups,
    overlong_mask,
    shape_scores,
    soft_overlong_penalty,
)
from openppo.types import SingleProcess

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def test_the_overlong_penalty_is_a_ramp() -> None:
    lengths = torch.tensor([0, 15, 16, 17, 18, 20, 25])
    penalty = soft_overlong_penalty(lengths, max_len=20, buffer_len=4)
    assert penalty.tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]
    assert soft_overlong_penalty(lengths, 20, 4, factor=2.0).tolist() == [0, 0, 0, -0.5, -1, -2, -2]
    assert soft_overlong_penalty(torch.tensor([0, 5, 20]), 20, 20).tolist() == [0, -0.25, -1]  # the longest buffer


SCORES = torch.tensor([1.0, 1.0, -3.0, 20.0])
TRUNCATED = torch.tensor([False, True, True, False])
LENGTHS = torch.tensor([10, 20, 20, 18])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, -3, 10]),  # clipped at 10 by default
        ({"missing_eos_penalty": 0.5}, [1, 0.5, -3.5, 10]),
        ({"overlong_buffer_len": 4}, [1, 0, -4, 10]),
        (
            {"overlong_buffer_len": 4, "overlong_penalty_factor": 3.0, "reward_clip_range": (-5.0, 50.0)},
            [1, -2, -5, 18.5],
        ),
        ({"missing_eos_penalty": 0.5, "overlong_buffer_len": 4}, [1, -0.5, -4.5, 10]),
    ],
)
def test_scores_are_penalized_and_then_clipped(options: dict[str, Any], expected: list[float]) -> None:
    shaped = shape_scores(SCORES, TRUNCATED, LENGTHS, RewardShapingConfig(**options), max_len=20)
    assert shaped.tolist() == pytest.approx(expected)
    assert shaped.dtype == torch.float32


def test_the_overlong_filter_takes_all_actions_of_cut_off_responses() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]])
    assert overlong_mask(mask, torch.tensor([False, True])).tolist() == [[False, True, True], [False, False, False]]


def test_groups_of_one_reward_are_found_in_any_order() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.1, 1.0, 0.1])
    groups = torch.tensor([70, 3, 70, 3, -5, 3, -5])
    assert one_reward_groups(rewards, groups).tolist() == [True, False, True, False, True, False, True]
    assert one_reward_groups(torch.tensor([2.0]), torch.tensor([0])).tolist() == [True]  # nothing to compare with
    assert one_reward_groups(torch.zeros(0), torch.zeros(0).long()).tolist() == []


def test_negative_rewards_are_compared_too() -> None:
    assert one_reward_groups(torch.tensor([-1.0, -2.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1])).tolist() == [
        False,
        False,
        True,
        True,
    ]


BATCHES = [[1.0, 2.0, 4.0, 1e4], [1e4 + 1], [], [-5.0, 0.5, 1e4 + 2]]


def moments_of(batches: list[list[float]], comm: Any) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(torch.tensor(batch)[comm.rank :: comm.world_size], comm)
    return moments


def test_running_moments_are_those_of_all_scores_at_once() -> None:
    everything = [score for batch in BATCHES for score in batch]
    moments = moments_of(BATCHES, SingleProcess())
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    assert (moments.count, moments.mean) == (len(everything), pytest.approx(mean, rel=1e-12))
    normalized = moments.normalize(torch.tensor([mean, mean + deviation, mean - 2 * deviation], dtype=torch.float64))
    assert normalized.tolist() == pytest.approx([0, 1, -2], abs=1e-9)


@pytest.mark.parametrize("world_size", [2, 3])
def test_running_moments_do_not_depend_on_the_number_of_ranks(world_size: int, on_ranks: OnRanks) -> None:
    alone = moments_of(BATCHES, SingleProcess()).state_dict()
    for together in on_ranks(world_size, lambda comm: moments_of(BATCHES, comm).state_dict()):
        assert together == pytest.approx(alone, rel=1e-12)


def test_running_moments_go_on_after_a_checkpoint() -> None:
    first, second = moments_of(BATCHES[:2], SingleProcess()), RunningMoments()
    second.load_state_dict(first.state_dict())
    for batch in BATCHES[2:]:
        second.update(torch.tensor(batch), SingleProcess())
    assert second.state_dict() == moments_of(BATCHES, SingleProcess()).state_dict()


def test_one_score_normalizes_to_zero() -> None:
    moments = moments_of([[3.0]], SingleProcess())
    assert moments.normalize(torch.tensor([3.0])).tolist() == [0.0]
    assert RunningMoments().normalize(torch.tensor([0.0])).tolist() == [0.0]
