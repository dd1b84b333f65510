"""The reward of each token, worked out by hand."""

import math

import pytest
import torch

from openppo.experience import compute_reward
from openppo.experience.token_rewards import kl_penalty

KL = torch.tensor([[0.5, 0.25, -1.0, 2.0, 4.0, 8.0]])


def rewards_of(actions: list[int], score: float, kl: torch.Tensor | None = KL, **options: object) -> list[float]:
    mask = torch.tensor([actions]).bool()
    rewards = compute_reward(torch.tensor([score]), kl, mask, 0.1, **options)
    assert rewards.dtype == torch.float32
    return rewards[0].tolist()


def test_every_action_pays_for_its_kl_and_the_last_one_gets_the_score() -> None:
    # prompt of two tokens, response of three that ends with the end of sequence, one place of padding
    assert rewards_of([0, 0, 1, 1, 1, 0], 3.0) == pytest.approx([0, 0, 0.1, -0.2, 3.0 - 0.4, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("log_prob", "reference", "penalty"),
    [
        (-14.0, -0.1, 10.0),  # exp(13.9) - 1 - 13.9 = 1.09e6
        (-0.1, -14.0, 10.0),  # 13.9 - 1 + exp(-13.9)
        (-200.0, -1.0, 10.0),  # more than float32 holds
        (-3.0, -1.0, math.exp(2) - 3),
        (-1.0, -3.0, math.exp(-2) + 1),
    ],
)
def test_k3_as_a_penalty_is_at_most_ten(log_prob: float, reference: float, penalty: float) -> None:
    given = torch.tensor([[log_prob]]), torch.tensor([[reference]]), torch.tensor([[True]])
    assert kl_penalty(*given, "k3").item() == pytest.approx(penalty, rel=1e-6)
    assert kl_penalty(*given, "k1").item() == pytest.approx(log_prob - reference)
    assert kl_penalty(*given, "k2").item() == pytest.approx((log_prob - reference) ** 2 / 2)


def test_the_score_is_on_the_last_action_though_the_environment_wrote_more() -> None:
    assert rewards_of([0, 1, 0, 1, 0, 0], 3.0) == pytest.approx([0, -0.025, 0, 3.0 - 0.2, 0, 0], abs=1e-6)


def test_a_response_cut_by_length_is_scored_at_its_last_token() -> None:
    assert rewards_of([0, 0, 0, 1, 1, 1], -2.0) == pytest.approx([0, 0, 0, -0.2, -0.4, -2.0 - 0.8], abs=1e-6)


def test_a_response_that_ends_at_once_has_score_and_kl_on_one_token() -> None:
    assert rewards_of([0, 0, 1, 0, 0, 0], 3.0) == pytest.approx([0, 0, 3.1, 0, 0, 0], abs=1e-6)


def test_a_row_without_actions_has_no_reward() -> None:
    assert rewards_of([0] * 6, 3.0) == [0.0] * 6


def test_an_action_at_the_very_first_place_can_hold_the_score() -> None:
    assert rewards_of([1, 0, 0, 0, 0, 0], 3.0) == pytest.approx([3.0 - 0.05, 0, 0, 0, 0, 0], abs=1e-6)


def test_without_a_reference_only_the_score_is_left() -> None:
    assert rewards_of([0, 0, 1, 1, 1, 0], 3.0, kl=None) == [0, 0, 0, 0, 3.0, 0]


@pytest.mark.parametrize(("score", "clipped"), [(3.0, 1.5), (-3.0, -2.0), (0.75, 0.75)])
def test_the_score_is_clipped_and_the_kl_is_not(score: float, clipped: float) -> None:
    large_kl = 100 * KL
    found = rewards_of([0, 0, 0, 0, 1, 1], score, large_kl, reward_clip_range=(-2.0, 1.5))
    assert found == pytest.approx([0, 0, 0, 0, -40.0, clipped - 80.0], abs=1e-5)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_a_kl_outside_the_mask_is_never_read(strange: float) -> None:
    kl = torch.where(torch.tensor([0, 0, 1, 1, 0, 0]).bool(), KL, strange)
    assert rewards_of([0, 0, 1, 1, 0, 0], 1.0, kl) == pytest.approx([0, 0, 0.1, 0.8, 0, 0], abs=1e-6)


def test_rows_have_their_own_last_action_and_score() -> None:
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 1, 0]]).bool()
    rewards = compute_reward(torch.tensor([1.0, 2.0, 3.0]), None, mask, 0.1)
    assert rewards.tolist() == [[0, 0, 1.0], [0, 0, 0], [0, 3.0, 0]]


def test_scores_of_whole_numbers_are_fine() -> None:
    mask = torch.tensor([[False, True]])
    assert compute_reward(torch.tensor([2]), None, mask, 0.0, (-1.0, 1.0)).tolist() == [[0.0, 1.0]]


def test_rewards_of_single_tokens_are_added_and_not_clipped() -> None:
    extra = torch.tensor([[9.0, 9.0, 0.5, 0.0, -7.0, 9.0]])
    found = rewards_of([0, 0, 1, 1, 1, 0], 3.0, reward_clip_range=(-1.0, 1.0), token_rewards=extra)
    assert found == pytest.approx([0, 0, 0.5 + 0.1, -0.2, 1.0 - 7.0 - 0.4, 0], abs=1e-6)


def test_a_token_reward_outside_the_mask_is_never_read() -> None:
    extra = torch.tensor([[math.nan, math.nan, 0.5, 0.25, math.inf, math.nan]])
    found = rewards_of([0, 0, 1, 1, 0, 0], 1.0, kl=None, token_rewards=extra)
    assert found == [0, 0, 0.5, 1.25, 0, 0]
