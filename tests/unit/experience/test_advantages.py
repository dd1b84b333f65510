"""Advantages and returns against numbers worked out by hand and plain loops over actions in float64."""

import math

import pytest
import torch

from openppo.experience import (
    get_advantages_and_returns,
    get_cumulative_returns,
    length_adaptive_lambda,
)

TIGHT = {"rtol": 0, "atol": 1e-9}
MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 0, 0],  # one turn, padding
        [0, 1, 1, 0, 0, 1, 0, 1],  # turns with tokens of an environment between them
        [0, 0, 0, 0, 0, 0, 0, 0],  # nothing
        [0, 0, 1, 0, 0, 0, 0, 0],  # one action
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
).bool()
DRAWN = torch.randn(
    2, *MASK.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64
)
VALUES, REWARDS = torch.where(MASK, DRAWN, 0.0)


def naive_returns(rewards, discount):
    n = len(rewards)
    return [sum(discount ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)]


def naive_advantages(values, rewards, gamma, lambd):
    """GAE as the sum it is defined by: A_t = sum over k of (gamma lambda)^k delta_{t+k}; lists of actions only."""
    deltas = [
        r + gamma * after - v
        for r, v, after in zip(rewards, values, [*values, 0.0][1:], strict=True)
    ]
    return naive_returns(deltas, gamma * lambd)


def by_rows(function, *tensors):
    """``function`` on the list of actions of each row, put back at their places."""
    result = torch.zeros(MASK.shape, dtype=torch.float64)
    for b in range(len(MASK)):
        result[b, MASK[b]] = torch.tensor(
            function(*(t[b, MASK[b]].tolist() for t in tensors)), dtype=torch.float64
        )
    return result


@pytest.mark.parametrize(
    ("values", "rewards", "actions", "advantages", "returns"),
    [
        # deltas: 0.5 + 0.5 * 2 - 1 = 0.5; 0 + 0.5 * 3 - 2 = -0.5; 4 - 3 = 1
        # advantages: 1; -0.5 + 0.4 * 1 = -0.1; 0.5 + 0.4 * -0.1 = 0.46
        ([0.0, 1, 2, 3], [0.0, 0.5, 0, 4], [0, 1, 1, 1], [0, 0.46, -0.1, 1], [0, 1.46, 1.9, 4]),
        # the next action after token 1 is token 4: delta = 0.5 + 0.5 * 2 - 1 = 0.5, advantage = 0.5 + 0.4 * 2
        (
            [0.0, 1, 9, 9, 2],
            [0.0, 0.5, 9, 9, 4],
            [0, 1, 0, 0, 1],
            [0, 1.3, 0, 0, 2],
            [0, 2.3, 0, 0, 4],
        ),
    ],
)
def test_advantages_by_hand_and_holes_are_crossed_without_discount(
    values, rewards, actions, advantages, returns
):
    given = torch.tensor([values]), torch.tensor([rewards]), torch.tensor([actions]).bool()
    found = get_advantages_and_returns(*given, gamma=0.5, lambd=0.8)
    assert [x[0].tolist() for x in found] == [
        pytest.approx(advantages, abs=1e-6),
        pytest.approx(returns, abs=1e-6),
    ]


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 0.95), (0.99, 0.0), (0.5, 1.0), (0.0, 0.7)])
def test_advantages_and_returns_equal_the_sums_they_are_defined_by(gamma, lambd):
    expected = by_rows(lambda v, r: naive_advantages(v, r, gamma, lambd), VALUES, REWARDS)
    advantages, returns = get_advantages_and_returns(VALUES, REWARDS, MASK, gamma, lambd)
    torch.testing.assert_close(advantages, expected, **TIGHT)
    torch.testing.assert_close(returns, torch.where(MASK, expected + VALUES, 0.0), **TIGHT)
    to_go = by_rows(lambda r: naive_returns(r, gamma), REWARDS)
    torch.testing.assert_close(get_cumulative_returns(REWARDS, MASK, gamma), to_go, **TIGHT)
    other, monte_carlo = get_advantages_and_returns(
        VALUES, REWARDS, MASK, gamma, lambd, lambd_critic=1.0
    )
    assert torch.equal(other, advantages), "a critic may have a lambda of its own"
    torch.testing.assert_close(monte_carlo, to_go, **TIGHT)


def test_a_row_has_its_own_lambda_whatever_lies_beside_it():
    lambdas = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0], dtype=torch.float64)
    together, _ = get_advantages_and_returns(VALUES, REWARDS, MASK, 0.9, lambdas)
    for b, lambd in enumerate(lambdas.tolist()):
        row = (
            slice(b, b + 1),
            slice(0, 1 + max(MASK[b].nonzero().flatten().tolist(), default=0)),
        )  # without padding
        alone, _ = get_advantages_and_returns(VALUES[row], REWARDS[row], MASK[row], 0.9, lambd)
        assert torch.equal(together[row], alone)


def test_the_adaptive_lambda_by_hand():
    mask = torch.arange(400) < torch.tensor([[400], [100], [20], [10], [0]])
    # alpha 0.05: 1 - 1/20, 1 - 1/5, 1 - 1/1, 1 - 1/0.5 below 0, no action
    assert length_adaptive_lambda(mask, 0.05).tolist() == pytest.approx(
        [0.95, 0.8, 0, 0, 0], abs=1e-6
    )
    weights = sum(
        0.95**k for k in range(10_000)
    )  # what the paper asks for: they add up to alpha x length
    assert weights == pytest.approx(0.05 * 400)


@pytest.mark.parametrize("strange", [math.nan, math.inf, 1e30])
def test_what_lies_outside_the_mask_is_never_read_and_inputs_are_not_changed(strange):
    values, rewards = torch.where(MASK, VALUES, strange), torch.where(MASK, REWARDS, strange)
    before = values.clone(), rewards.clone()
    found = (
        *get_advantages_and_returns(values, rewards, MASK, 0.9, 0.8),
        get_cumulative_returns(rewards, MASK, 0.9),
    )
    clean = (
        *get_advantages_and_returns(VALUES, REWARDS, MASK, 0.9, 0.8),
        get_cumulative_returns(REWARDS, MASK, 0.9),
    )
    assert all(map(torch.equal, found, clean))
    assert not any(x[~MASK].any() for x in found)
    torch.testing.assert_close((values, rewards), before, rtol=0, atol=0, equal_nan=True)
