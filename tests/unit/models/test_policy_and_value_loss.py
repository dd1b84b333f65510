"""The clipped losses of PPO against numbers worked out by hand and a loop over tokens in plain Python."""

import math

import pytest
import torch

from openppo.models.loss import PolicyLoss, ValueLoss, policy_ratio

NOT_FINITE = [math.nan, math.inf, -math.inf]
HOLES = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
EMPTY_ROW = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()


def policy_token(new, old, advantage, low, high, dual):
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    loss = max(-ratio * advantage, -max(1 - low, min(1 + high, ratio)) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def value_token(value, old, target, clip):
    squares = [(value - target) ** 2]
    if clip is not None:
        squares.append((max(old - clip, min(old + clip, value)) - target) ** 2)
    return 0.5 * max(squares)


def reduced(rows, reduction):
    """``rows`` holds the losses of the action tokens of each sequence."""
    if reduction == "sequence_mean":
        return sum(sum(row) / len(row) if row else 0.0 for row in rows) / len(rows)
    tokens = [loss for row in rows for loss in row]
    return sum(tokens) / len(tokens)


def random_inputs(seed=0):
    """Three float64 tensors of the masks' shape, the first two close to each other."""
    generator = torch.Generator().manual_seed(seed)
    first, noise, third = torch.randn(3, *HOLES.shape, generator=generator, dtype=torch.float64)
    return first, first + 0.5 * noise, third


def rows_of(mask, *tensors):
    return [
        [tuple(t[b, i].item() for t in tensors) for i in range(mask.shape[1]) if mask[b, i]]
        for b in range(mask.shape[0])
    ]


def one(number, **options):
    return torch.tensor([[number]], dtype=torch.float64, **options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the clip range the slope by the log-prob is -r A
        (1.5, 2.0, -2.4, 0.0),  # better than allowed: clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # got worse: not clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0),  # got worse: not clipped
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_policy_loss_is_clipped_on_the_side_that_would_gain(ratio, advantage, loss, slope):
    log_probs = one(math.log(ratio), requires_grad=True)
    found = PolicyLoss(clip_eps=0.2)(log_probs, one(0.0), one(advantage))
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-9)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(slope, abs=1e-9)


def test_the_upper_clip_range_can_be_wider_than_the_lower():
    loss = PolicyLoss(clip_eps=0.2, clip_eps_high=0.28)
    assert loss(one(math.log(1.5)), one(0.0), one(1.0)).item() == pytest.approx(-1.28)
    assert loss(one(math.log(0.5)), one(0.0), one(-1.0)).item() == pytest.approx(0.8)
    assert PolicyLoss(clip_eps=0.3)(one(math.log(1.5)), one(0.0), one(1.0)).item() == pytest.approx(-1.3)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    bounded, free = PolicyLoss(dual_clip=3.0), PolicyLoss()
    far = one(math.log(5.0))
    assert free(far, one(0.0), one(-2.0)).item() == pytest.approx(10.0)
    assert bounded(far, one(0.0), one(-2.0)).item() == pytest.approx(6.0)
    assert bounded(far, one(0.0), one(2.0)).item() == pytest.approx(-2.4)
    assert bounded(one(math.log(2.0)), one(0.0), one(-2.0)).item() == pytest.approx(4.0)


def test_beyond_the_dual_clip_there_is_no_gradient():
    log_probs = torch.tensor([[math.log(5.0), math.log(2.0)]], requires_grad=True)
    PolicyLoss(dual_clip=3.0)(log_probs, torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]])).backward()
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-6)  # the second: r / 2 tokens


def test_the_log_ratio_is_clamped_to_twenty():
    ratio = policy_ratio(torch.tensor([[50.0, -50.0, 19.0]], dtype=torch.float64), torch.zeros(1, 3))
    assert ratio[0].tolist() == pytest.approx([485165195.40979, 2.061153622438558e-09, 178482300.963187], rel=1e-12)
    far = one(1000.0, requires_grad=True)
    loss = PolicyLoss()(far, one(0.0), one(-1.0))
    loss.backward()
    assert loss.item() == pytest.approx(485165195.40979, rel=1e-12)
    assert far.grad is not None
    assert far.grad.item() == 0.0


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("mask", [HOLES, EMPTY_ROW], ids=["holes", "empty row"])
@pytest.mark.parametrize(("high", "dual"), [(None, None), (0.28, None), (None, 1.5), (0.28, 1.5)])
def test_the_policy_loss_equals_a_loop_over_action_tokens(mask, reduction, high, dual):
    log_probs, old, advantages = random_inputs()
    loss = PolicyLoss(0.2, high, dual, reduction=reduction)(log_probs, old, advantages, mask)
    top = 0.2 if high is None else high
    rows = [
        [policy_token(new, before, advantage, 0.2, top, dual) for new, before, advantage in row]
        for row in rows_of(mask, log_probs, old, advantages)
    ]
    assert loss.item() == pytest.approx(reduced(rows, reduction), abs=1e-9)


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("mask", [HOLES, EMPTY_ROW], ids=["holes", "empty row"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_equals_a_loop_over_action_tokens(mask, reduction, clip):
    values, old, targets = random_inputs(1)
    loss = ValueLoss(clip, reduction=reduction)(values, old, targets, mask)
    rows = [
        [value_token(value, before, target, clip) for value, before, target in row]
        for row in rows_of(mask, values, old, targets)
    ]
    assert loss.item() == pytest.approx(reduced(rows, reduction), abs=1e-9)


def test_the_two_means_differ_when_sequences_differ_in_length():
    log_probs = torch.zeros(2, 3)
    advantages = torch.tensor([[1.0, 1.0, 1.0], [3.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    by = {r: PolicyLoss(reduction=r)(log_probs, log_probs, advantages, mask) for r in ("sequence_mean", "token_mean")}
    assert by["sequence_mean"].item() == pytest.approx(-2.0)  # (-1 - 3) / 2
    assert by["token_mean"].item() == pytest.approx(-1.5)  # -6 / 4
    assert PolicyLoss()(log_probs, log_probs, advantages, mask).item() == pytest.approx(-2.0)  # the default


def test_reduction_none_gives_each_token_and_zero_outside_the_mask():
    zeros, mask = torch.zeros(1, 3), torch.tensor([[True, False, True]])
    numbers = torch.tensor([[1.0, 2.0, 3.0]])
    assert PolicyLoss(reduction="none")(zeros, zeros, numbers, mask).tolist() == [[-1.0, 0.0, -3.0]]
    assert ValueLoss(reduction="none")(numbers, zeros, zeros, mask).tolist() == [[0.5, 0.0, 4.5]]


def test_without_a_mask_every_token_counts():
    zeros, numbers = torch.zeros(1, 3), torch.tensor([[1.0, 2.0, 3.0]])
    assert PolicyLoss()(zeros, zeros, numbers).item() == pytest.approx(-2.0)
    assert ValueLoss()(numbers, zeros, zeros).item() == pytest.approx(14 / 6)


def test_a_batch_without_any_action_has_loss_zero_and_gradient_zero():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for loss in (PolicyLoss(), PolicyLoss(reduction="token_mean"), ValueLoss(0.2), ValueLoss(reduction="token_mean")):
        predicted = torch.ones(2, 3, requires_grad=True)
        found = loss(predicted, torch.zeros(2, 3), torch.ones(2, 3), nothing)
        found.backward()
        assert found.item() == 0.0
        assert predicted.grad is not None
        assert bool((predicted.grad == 0).all())


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # unchanged value: plain squared error
        (1.5, 1.0, 3.0, 1.62, 0.0),  # moved 0.5 towards the target, only 0.2 count
        (0.5, 1.0, 3.0, 3.125, -2.5),  # moved away: not clipped
        (2.0, 1.0, 1.0, 0.5, 1.0),  # moved past the clip range, away from the target
    ],
)
def test_the_clipped_value_loss_takes_the_larger_of_the_two_errors(value, old, target, loss, slope):
    values = one(value, requires_grad=True)
    found = ValueLoss(clip_eps=0.2)(values, one(old), one(target))
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-9)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-9)


def test_without_clipping_the_old_value_does_not_matter():
    for old in (0.0, 100.0):
        assert ValueLoss()(one(1.5), one(old), one(3.0)).item() == pytest.approx(1.125)


@pytest.mark.parametrize("strange", NOT_FINITE)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda reduction: PolicyLoss(reduction=reduction),
        lambda reduction: PolicyLoss(dual_clip=3.0, reduction=reduction),
        lambda reduction: ValueLoss(reduction=reduction),
        lambda reduction: ValueLoss(0.2, reduction=reduction),
    ],
    ids=["policy", "dual clip", "value", "clipped value"],
)
def test_what_lies_outside_the_mask_changes_neither_loss_nor_gradient(make, reduction, place, strange):
    def loss_and_gradient(outside):
        inputs = [tensor.clone() for tensor in random_inputs(2)]
        inputs[place] = torch.where(EMPTY_ROW, inputs[place], outside)
        inputs[0].requires_grad_()
        loss = make(reduction)(*inputs, EMPTY_ROW)
        loss.sum().backward()
        assert inputs[0].grad is not None
        return loss.detach(), inputs[0].grad

    loss, gradient = loss_and_gradient(strange)
    expected_loss, expected_gradient = loss_and_gradient(0.25)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(gradient, expected_gradient)
    assert bool((gradient[~EMPTY_ROW] == 0).all())
    assert bool((gradient[EMPTY_ROW] != 0).any())


def test_an_unknown_reduction_is_refused_by_name():
    zeros = torch.zeros(1, 1)
    for loss in (PolicyLoss(reduction="mean"), ValueLoss(reduction="mean")):
        with pytest.raises(ValueError, match="sequence_mean, token_mean or none, got 'mean'"):
            loss(zeros, zeros, zeros, None)
