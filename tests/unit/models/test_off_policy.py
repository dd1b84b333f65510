"""Losses and weights for samples of another policy, against formulas over single tokens (check D1)."""

import math

import pytest
import torch

from openppo.models import DecoupledLoss, DoubleSidedLoss, PolicyLoss
from openppo.models.correction import rollout_correction

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
N_TOKENS = int(MASK.sum())
LEVELS = ("token", "sequence", "geometric")


def tensors(spread=0.6):
    """Log-probs of the policy, the old one and the engine, near each other, and advantages of both signs; float64."""
    generator = torch.Generator().manual_seed(4)
    first, *noises, advantages = torch.randn(
        4, *MASK.shape, generator=generator, dtype=torch.float64
    )
    return first - 2, *(first - 2 + spread * noise for noise in noises), advantages


def over_rows(formula, *given):
    """``formula`` of each row's numbers at its actions, one tuple per token; 0 elsewhere."""
    found = torch.zeros(MASK.shape, dtype=torch.float64)
    for b in range(len(MASK)):
        numbers = formula(
            list(zip(*(tensor[b, MASK[b]].tolist() for tensor in given), strict=True))
        )
        found[b, MASK[b]] = torch.tensor(numbers, dtype=torch.float64)
    return found


def weights_by_hand(method, level, low, high, veto):
    """Of rows of (old, rollout)."""

    def of_row(row):
        each = [math.exp(old - rollout) for old, rollout in row]
        if veto is not None and any(k < veto for k in each):
            return [0.0] * len(row)
        whole = {
            "sequence": math.prod(each),
            "geometric": math.prod(each) ** (1 / max(len(row), 1)),
        }
        ks = each if level == "token" else [whole[level]] * len(row)
        return (
            [min(k, high) for k in ks]
            if method == "tis"
            else [k if low <= k <= high else 0.0 for k in ks]
        )

    return of_row


DEFAULTS = {"tis": (0.0, 2.0), "mis": (0.5, 2.0), "icepop": (0.5, 5.0)}


@pytest.mark.parametrize("veto", [None, 0.4])
@pytest.mark.parametrize("given", [(None, None), (0.7, 1.4)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("method", DEFAULTS)
def test_weights_of_tokens_and_sequences_are_those_of_the_formula(method, level, given, veto):
    _, old, rollout, _ = tensors()
    low, high = given if given[0] else (0.99, 1.01) if level == "geometric" else DEFAULTS[method]
    expected = over_rows(weights_by_hand(method, level, low, high, veto), old, rollout)
    strange = [
        torch.where(MASK, tensor, number)
        for tensor, number in ((old, math.nan), (rollout, math.inf))
    ]
    found = rollout_correction(*strange, MASK, method, *given, level, veto)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert veto is None or (
        bool((found[MASK] == 0).any()) and bool((found != 0).any() or given == (None, None))
    )


def test_a_veto_of_one_token_leaves_out_its_sequence_only():
    rollout = torch.zeros(2, 3)
    old = torch.tensor([[0.0, 0.0, math.log(2e-4)], [0.0, math.log(0.5e-4), 0.0]])
    found = rollout_correction(old, rollout, torch.ones(2, 3), "tis", veto=1e-4)
    assert found.tolist() == [[1.0, 1.0, pytest.approx(2e-4)], [0.0, 0.0, 0.0]]
    assert rollout_correction(old - 100, rollout, torch.ones(2, 3), "tis", veto=1e-40).sum() == 0, (
        "below the clamp"
    )
    with pytest.raises(ValueError, match="token, sequence or geometric, got 'row'"):
        rollout_correction(old, rollout, torch.ones(2, 3), "tis", level="row")  # type: ignore[arg-type]


def double_sided(row):
    ratios = [math.exp(new - rollout) for new, _, rollout, _ in row]
    return [-r * a if 0.8 <= r <= 1.28 else 0.0 for r, (*_, a) in zip(ratios, row, strict=True)]


def decoupled(row):
    losses = []
    for new, old, rollout, a in row:
        u, k = math.exp(new - old), math.exp(old - rollout)
        losses.append((k if k <= 5.0 else 0.0) * -min(u * a, max(0.8, min(1.2, u)) * a))
    return losses


BOTH = pytest.mark.parametrize(
    ("kind", "formula", "spread"),
    [(DoubleSidedLoss, double_sided, 0.3), (DecoupledLoss, decoupled, 1.5)],
)


@BOTH
def test_losses_are_those_of_the_formula_and_tokens_left_out_still_count(kind, formula, spread):
    new, old, rollout, advantages = tensors(spread)
    expected = over_rows(formula, new, old, rollout, advantages)
    assert 0 < int((expected[MASK] == 0).sum()) < N_TOKENS
    for reduction, value in (
        ("none", expected),
        ("token_mean", expected.sum() / N_TOKENS),
        ("sequence_mean", (expected.sum(-1) / MASK.sum(-1).clamp(min=1)).mean()),
    ):
        found = kind(reduction=reduction)(new, old, advantages, MASK, rollout)
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=f"{kind.__name__} compares .* pass rollout_log_probs"):
        kind()(new, old, advantages, MASK)


@BOTH
def test_what_lies_outside_the_mask_changes_neither_loss_nor_gradient(kind, formula, spread):
    def loss_and_gradient(outside):
        new, old, rollout, advantages = (
            torch.where(MASK, tensor, outside) for tensor in tensors(spread)
        )
        loss = kind()(new.requires_grad_(), old, advantages, MASK, rollout)
        return loss.detach(), *torch.autograd.grad(loss, new)

    expected = loss_and_gradient(0.25)
    assert all(
        torch.equal(a, b)
        for x in (math.nan, math.inf)
        for a, b in zip(loss_and_gradient(x), expected, strict=True)
    )
    assert bool((expected[1][~MASK] == 0).all())


def gradient(loss_of, at):
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss_of(at).sum(), at)[0]


def test_the_gradient_of_f_of_r_is_that_of_a_weighted_log_prob():
    new, old, rollout, advantages = tensors(0.3)
    factor = over_rows(
        lambda row: [-x for x in double_sided([(*each, 1.0) for each in row])], new, old, rollout
    )
    expected = gradient(lambda x: -factor * advantages * x, new)
    found = gradient(
        lambda x: DoubleSidedLoss(reduction="none")(x, old, advantages, MASK, rollout), new
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(
    ("ratio", "inside"), [(0.79, False), (0.81, True), (1.27, True), (1.29, False), (50.0, False)]
)
def test_outside_the_interval_the_gradient_is_exactly_zero_for_both_signs(ratio, inside, advantage):
    new, rollout = torch.tensor([[math.log(ratio) - 2]]), torch.tensor([[-2.0]])
    found = gradient(
        lambda x: DoubleSidedLoss()(x, rollout, torch.tensor([[advantage]]), None, rollout), new
    ).item()
    assert found == (pytest.approx(-ratio * advantage, rel=1e-5) if inside else 0.0)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("k", "inside"), [(1e-3, True), (4.99, True), (5.01, False)])
def test_decoupled_leaves_out_tokens_above_the_cap_and_none_below(k, inside, advantage):
    old, rollout = torch.tensor([[math.log(k) - 9]]), torch.tensor([[-9.0]])
    found = gradient(
        lambda x: DecoupledLoss()(x, old, torch.tensor([[advantage]]), None, rollout), old
    ).item()
    assert found == (pytest.approx(-k * advantage, rel=1e-5) if inside else 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_where_all_policies_agree_each_is_the_plain_policy_gradient(level):
    _, _, policy, advantages = tensors()
    expected = torch.where(MASK, -advantages, 0.0)
    given = policy, advantages, MASK, policy
    losses = [
        lambda x, kind=kind: kind(reduction="none")(x, *given)
        for kind in (DoubleSidedLoss, DecoupledLoss)
    ]
    for method in ("none", *DEFAULTS):
        weights = rollout_correction(policy, policy, MASK, method, level=level, veto=0.5)
        losses.append(lambda x, weights=weights: weights * PolicyLoss(reduction="none")(x, *given))
    for loss in losses:
        torch.testing.assert_close(gradient(loss, policy), expected, rtol=0, atol=1e-6)
