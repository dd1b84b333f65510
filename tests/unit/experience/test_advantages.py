"""Advantages and returns against numbers worked out by hand and plain loops over actions in float64."""

import math

import pytest
import torch
from torch import Tensor

from openppo.experience import get_advantages_and_returns, get_cumulative_returns, length_adaptive_lambda

GAMMAS_AND_LAMBDAS = [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.5, 1.0), (0.0, 0.7), (1.0, 1.0)]
TIGHT = {"rtol": 0, "atol": 1e-9}


def mask_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows).bool()


MASK = mask_of(
    [0, 0, 1, 1, 1, 1, 0, 0],  # one turn, padding
    [0, 1, 1, 0, 0, 1, 0, 1],  # turns with tokens of an environment between them
    [0, 0, 0, 0, 0, 0, 0, 0],  # nothing
    [0, 0, 1, 0, 0, 0, 0, 0],  # one action
    [1, 1, 1, 1, 1, 1, 1, 1],
)


def random_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    values, rewards = torch.randn(2, *MASK.shape, generator=generator, dtype=torch.float64)
    return torch.where(MASK, values, 0.0), torch.where(MASK, rewards, 0.0)


def naive_advantages(values: list[float], rewards: list[float], gamma: float, lambd: float) -> list[float]:
    """GAE as the sum it is defined by: A_t = sum over k of (gamma lambda)^k delta_{t+k}; lists of actions only."""
    n = len(values)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def by_rows(function: object, *tensors: Tensor) -> Tensor:
    """``function`` on the list of actions of each row, put back at their places."""
    result = torch.zeros(MASK.shape, dtype=torch.float64)
    for b in range(len(MASK)):
        result[b, MASK[b]] = torch.tensor(function(*(t[b, MASK[b]].tolist() for t in tensors)), dtype=torch.float64)
    return result


def test_a_response_of_three_tokens_worked_out_by_hand() -> None:
    values, rewards = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.5, 0.0, 4.0]])
    advantages, returns = get_advantages_and_returns(values, rewards, mask_of([0, 1, 1, 1]), gamma=0.5, lambd=0.8)
    # deltas: 0.5 + 0.5 * 2 - 1 = 0.5; 0 + 0.5 * 3 - 2 = -0.5; 4 - 3 = 1
    # advantages: 1; -0.5 + 0.4 * 1 = -0.1; 0.5 + 0.4 * -0.1 = 0.46
    assert advantages[0].tolist() == pytest.approx([0.0, 0.46, -0.1, 1.0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.0, 1.46, 1.9, 4.0], abs=1e-6)


def test_a_hole_in_the_mask_is_crossed_without_discount() -> None:
    values, rewards = torch.tensor([[0, 1.0, 9.0, 9.0, 2.0]]), torch.tensor([[0, 0.5, 9.0, 9.0, 4.0]])
    advantages, returns = get_advantages_and_returns(values, rewards, mask_of([0, 1, 0, 0, 1]), gamma=0.5, lambd=0.8)
    # the next action after token 1 is token 4: delta = 0.5 + 0.5 * 2 - 1 = 0.5, advantage = 0.5 + 0.4 * 2
    assert advantages[0].tolist() == pytest.approx([0, 1.3, 0, 0, 2.0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0, 2.3, 0, 0, 4.0], abs=1e-6)
    assert get_cumulative_returns(rewards, mask_of([0, 1, 0, 0, 1]), 0.5)[0].tolist() == [0, 2.5, 0, 0, 4.0]


@pytest.mark.parametrize(("gamma", "lambd"), GAMMAS_AND_LAMBDAS)
def test_advantages_equal_the_sum_they_are_defined_by(gamma: float, lambd: float) -> None:
    values, rewards = random_inputs()
    advantages, returns = get_advantages_and_returns(values, rewards, MASK, gamma, lambd)
    expected = by_rows(lambda v, r: naive_advantages(v, r, gamma, lambd), values, rewards)
    torch.testing.assert_close(advantages, expected, **TIGHT)
    torch.testing.assert_close(returns, torch.where(MASK, expected + values, 0.0), **TIGHT)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_cumulative_returns_equal_the_discounted_sum_of_later_rewards(gamma: float) -> None:
    _, rewards = random_inputs()
    expected = by_rows(
        lambda r: [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))], rewards
    )
    torch.testing.assert_close(get_cumulative_returns(rewards, MASK, gamma), expected, **TIGHT)


def test_without_discount_and_with_lambda_one_the_advantage_is_reward_to_go_minus_value() -> None:
    values, rewards = random_inputs()
    advantages, returns = get_advantages_and_returns(values, rewards, MASK, 1.0, 1.0)
    to_go = by_rows(lambda r: [sum(r[t:]) for t in range(len(r))], rewards)
    torch.testing.assert_close(returns, to_go, **TIGHT)
    torch.testing.assert_close(advantages, torch.where(MASK, to_go - values, 0.0), **TIGHT)


def test_with_lambda_zero_the_advantage_is_one_temporal_difference() -> None:
    values, rewards = random_inputs()
    advantages, _ = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.0)
    expected = by_rows(
        lambda v, r: [r[t] + 0.9 * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))],
        values,
        rewards,
    )
    torch.testing.assert_close(advantages, expected, **TIGHT)


def test_a_critic_may_have_a_lambda_of_its_own() -> None:
    values, rewards = random_inputs()
    advantages, returns = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.5, lambd_critic=0.8)
    expected, _ = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.5)
    other = by_rows(lambda v, r: naive_advantages(v, r, 0.9, 0.8), values, rewards)
    assert torch.equal(advantages, expected)
    torch.testing.assert_close(returns, torch.where(MASK, other + values, 0.0), **TIGHT)


def test_a_critic_with_lambda_one_learns_monte_carlo_returns() -> None:
    values, rewards = random_inputs()
    _, returns = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.5, lambd_critic=1.0)
    torch.testing.assert_close(returns, get_cumulative_returns(rewards, MASK, 0.9), **TIGHT)


def test_every_row_may_have_a_lambda_of_its_own() -> None:
    values, rewards = random_inputs()
    lambdas = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0], dtype=torch.float64)
    together, _ = get_advantages_and_returns(values, rewards, MASK, 0.9, lambdas)
    for b, lambd in enumerate(lambdas.tolist()):
        alone, _ = get_advantages_and_returns(values, rewards, MASK, 0.9, lambd)
        assert torch.equal(together[b], alone[b])


def test_the_adaptive_lambda_by_hand() -> None:
    mask = torch.zeros(5, 400).bool()
    for row, length in enumerate([400, 100, 20, 10, 0]):
        mask[row, 400 - length :] = True
    # alpha 0.05: 1 - 1/20, 1 - 1/5, 1 - 1/1, 1 - 1/0.5 below 0, no action
    assert length_adaptive_lambda(mask, 0.05).tolist() == pytest.approx([0.95, 0.8, 0, 0, 0], abs=1e-6)
    weights = sum(0.95**k for k in range(10_000))  # what the paper asks for: they add up to alpha x length
    assert weights == pytest.approx(0.05 * 400)


@pytest.mark.parametrize("strange", [math.nan, math.inf, 1e30])
def test_what_lies_outside_the_mask_is_never_read(strange: float) -> None:
    values, rewards = random_inputs()
    clean = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.8)
    strange_inputs = torch.where(MASK, values, strange), torch.where(MASK, rewards, strange)
    for found, expected in zip(get_advantages_and_returns(*strange_inputs, MASK, 0.9, 0.8), clean, strict=True):
        assert torch.equal(found, expected)
        assert bool((found[~MASK] == 0).all())
    assert torch.equal(get_cumulative_returns(strange_inputs[1], MASK, 0.9), get_cumulative_returns(rewards, MASK, 0.9))


def test_padding_and_the_rows_beside_it_do_not_change_a_row() -> None:
    values, rewards = random_inputs()
    together, _ = get_advantages_and_returns(values, rewards, MASK, 0.9, 0.8)
    for b in range(len(MASK)):
        end = 1 + max([t for t in range(MASK.shape[1]) if MASK[b, t]], default=0)
        row = slice(b, b + 1), slice(0, end)
        alone, _ = get_advantages_and_returns(values[row], rewards[row], MASK[row], 0.9, 0.8)
        assert torch.equal(alone, together[row])


def test_the_inputs_are_not_changed() -> None:
    values, rewards = random_inputs()
    before = values.clone(), rewards.clone()
    get_advantages_and_returns(values, rewards, MASK, 0.9, 0.8)
    get_cumulative_returns(rewards, MASK, 0.9)
    assert torch.equal(values, before[0])
    assert torch.equal(rewards, before[1])
