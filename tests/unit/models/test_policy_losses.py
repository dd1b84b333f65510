"""GSPO, CISPO and how token losses add up, against their formulas as plain loops and against sequence-level GSPO."""

import logging
import math
from typing import get_args

import pytest
import torch

from openppo.config import LossConfig, PolicyLossType
from openppo.models.loss import POLICY_LOSSES, CISPOLoss, GSPOLoss, PolicyLoss, policy_loss, token_weights

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
NOT_FINITE = [math.nan, math.inf, -math.inf]


def inputs(seed=0, spread=0.5):
    """Log-probs, old log-probs and advantages of the mask's shape."""
    generator = torch.Generator().manual_seed(seed)
    first, noise, advantages = torch.randn(3, *MASK.shape, generator=generator, dtype=torch.float64)
    return first - 2, first - 2 + spread * noise, advantages


def actions(row, *tensors):
    return list(zip(*(tensor[row, MASK[row]].tolist() for tensor in tensors), strict=True))


def test_the_gspo_ratio_is_the_geometric_mean_of_the_token_ratios():
    log_probs, old, _ = inputs()
    ratio = GSPOLoss().ratio(log_probs, old, MASK)
    for row in (0, 2):
        steps = actions(row, log_probs, old)
        expected = math.prod(math.exp(new - before) for new, before in steps) ** (1 / len(steps))
        assert ratio[row, MASK[row]].tolist() == pytest.approx([expected] * len(steps), abs=1e-12)
    assert bool((ratio[~MASK] == 1).all())


@pytest.mark.parametrize("dual", [None, 1.2])
def test_the_gspo_loss_equals_a_loop_over_sequences(dual):
    log_probs, old, advantages = inputs(1)
    found = GSPOLoss(0.05, 0.08, dual, reduction="none")(log_probs, old, advantages, MASK)
    for row in range(len(MASK)):
        steps = actions(row, log_probs, old, advantages)
        mean = sum(new - before for new, before, _ in steps) / max(len(steps), 1)
        ratio, clipped = math.exp(mean), min(max(math.exp(mean), 0.95), 1.08)
        expected = [max(-ratio * a, -clipped * a) for _, _, a in steps]
        if dual is not None:
            expected = [min(x, -dual * a) if a < 0 else x for x, (_, _, a) in zip(expected, steps, strict=True)]
        assert found[row, MASK[row]].tolist() == pytest.approx(expected, abs=1e-12)
    assert bool((found[~MASK] == 0).all())


@pytest.mark.parametrize(("low", "high"), [(5.0, 5.0), (1e-3, 1e-3)], ids=["nothing clipped", "clipped"])
def test_with_one_advantage_per_sequence_the_gradient_is_that_of_the_sequence_ratio(low, high):
    log_probs, old, _ = inputs(2)
    advantages = torch.tensor([[1.5], [0.3], [-0.7]], dtype=torch.float64)
    token_form, sequence_form = (log_probs.clone().requires_grad_() for _ in range(2))
    GSPOLoss(low, high)(token_form, old, advantages.expand(MASK.shape), MASK).backward()
    counts = MASK.sum(-1).clamp(min=1)
    ratio = (torch.where(MASK, sequence_form - old, 0.0).sum(-1) / counts).exp()  # differentiable, unlike the module's
    surrogate = torch.min(ratio * advantages[:, 0], ratio.clamp(1 - low, 1 + high) * advantages[:, 0])
    (-(surrogate * MASK.any(-1)).mean()).backward()
    torch.testing.assert_close(token_form.grad, sequence_form.grad, rtol=0, atol=1e-12)


def test_the_cispo_loss_equals_a_loop_over_action_tokens():
    log_probs, old, advantages = inputs(3, spread=2.0)
    found = CISPOLoss(1.5, reduction="none")(log_probs, old, advantages, MASK)
    for row in range(len(MASK)):
        expected = [-min(math.exp(new - b), 1.5) * a * new for new, b, a in actions(row, log_probs, old, advantages)]
        assert found[row, MASK[row]].tolist() == pytest.approx(expected, abs=1e-12)


def test_no_token_loses_its_gradient_under_cispo():
    log_probs = torch.tensor([[math.log(9.0), math.log(0.1), 0.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, 3.0, -1.0]])
    CISPOLoss(eps_max=5.0, reduction="none")(log_probs, torch.zeros(1, 3), advantages).sum().backward()
    assert log_probs.grad is not None
    # -min(r, 5) A: the ratio is a constant weight, with no lower bound
    assert log_probs.grad[0].tolist() == pytest.approx([-10.0, -0.3, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (PolicyLoss(0.2, 0.28), [True, False, True, False]),
        (GSPOLoss(0.2, 0.28), [False, False, False, False]),  # the mean log-ratio is log(0.972)
        (GSPOLoss(0.02, 0.03), [True, True, True, False]),
        (CISPOLoss(1.24), [False, True, False, False]),
    ],
    ids=["ppo", "gspo", "narrow gspo", "cispo"],
)
def test_clipped_says_which_tokens_reached_a_bound(loss, expected):
    ratios = torch.tensor([[0.7, 1.25, 1.05 * 0.75, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert loss.clipped(ratios.log(), torch.zeros(1, 4), mask)[0].tolist() == expected
    assert loss.clipped(ratios.log(), torch.zeros(1, 4), mask).dtype == torch.bool


@pytest.mark.parametrize("strange", NOT_FINITE)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("loss", [GSPOLoss(0.2, 0.2), CISPOLoss(1.5)], ids=["gspo", "cispo"])
def test_what_lies_outside_the_mask_changes_neither_loss_nor_gradient(loss, place, strange):
    def loss_and_gradient(outside):
        tensors = list(inputs(4))
        tensors[place] = torch.where(MASK, tensors[place], outside)
        tensors[0].requires_grad_()
        value = loss(*tensors, MASK)
        value.backward()
        assert tensors[0].grad is not None
        return value.detach(), tensors[0].grad

    found, expected = loss_and_gradient(strange), loss_and_gradient(0.25)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert bool((found[1][~MASK] == 0).all())
    assert bool((found[1][MASK] != 0).any())


@pytest.mark.parametrize("loss", [GSPOLoss(), CISPOLoss()], ids=["gspo", "cispo"])
def test_a_log_ratio_beyond_twenty_stays_finite(loss):
    far = torch.full((1, 2), 500.0, requires_grad=True)
    value = loss(far, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool())
    value.backward()
    assert math.isfinite(value.item())
    assert far.grad is not None
    assert bool(far.grad.isfinite().all())


def test_every_name_of_the_option_has_a_loss():
    assert set(POLICY_LOSSES) == set(get_args(PolicyLossType))


def test_options_reach_the_losses():
    ppo = policy_loss(LossConfig(eps_clip=0.1, eps_clip_high=0.3, dual_clip=4.0))
    gspo = policy_loss(LossConfig(policy_loss_type="gspo", eps_clip=0.1, eps_clip_high=0.3, dual_clip=4.0))
    cispo = policy_loss(LossConfig(policy_loss_type="cispo", cispo_eps_max=7.0))
    for loss, kind in ((ppo, PolicyLoss), (gspo, GSPOLoss)):
        assert type(loss) is kind
        assert isinstance(loss, PolicyLoss)
        assert (loss.clip_eps, loss.clip_eps_high, loss.dual_clip) == (0.1, 0.3, 4.0)
    assert isinstance(cispo, CISPOLoss)
    assert cispo.eps_max == 7.0
    assert {loss.reduction for loss in (ppo, gspo, cispo)} == {"none"}


def test_a_clip_range_that_is_too_wide_for_gspo_is_pointed_out(caplog):
    with caplog.at_level(logging.WARNING, logger="openppo"):
        policy_loss(LossConfig(policy_loss_type="gspo", eps_clip=3e-4, eps_clip_high=4e-4))
        assert caplog.text == ""
        policy_loss(LossConfig(policy_loss_type="gspo"))
    assert "--eps_clip 0.2 clips next to nothing" in caplog.text


LOSSES = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 9.0, 9.0, 9.0, 9.0], [9.0, 4.0, 5.0, 6.0, 7.0]])


@pytest.mark.parametrize(
    ("loss_agg", "expected"),
    [("token_mean", 28 / 7), ("sequence_mean", (6 / 3 + 22 / 4) / 2), ("constant", 28 / (2 * 10))],
)
def test_token_losses_add_up_by_hand_and_rows_without_actions_do_not_count(loss_agg, expected):
    weights = token_weights(MASK, loss_agg, n_tokens=7, n_sequences=2, max_len=10)
    assert weights.dtype == torch.float32
    assert (LOSSES * weights).sum().item() == pytest.approx(expected, abs=1e-6)
    assert bool((weights[~MASK] == 0).all())


def test_a_step_without_any_action_has_weights_of_zero():
    for loss_agg in ("token_mean", "sequence_mean", "constant"):
        assert bool((token_weights(torch.zeros(2, 3), loss_agg, 0, 0, 5) == 0).all())


def test_an_unknown_aggregation_is_refused_by_name():
    with pytest.raises(ValueError, match="token_mean, sequence_mean or constant, got 'mean'"):
        token_weights(MASK, "mean", 7, 2, 10)  # type: ignore[arg-type]
