"""Policy and value losses and their correction, against loops over tokens and numbers worked out by hand."""

import logging
import math
import statistics
from typing import get_args

import pytest
import torch

from openppo.config import LossConfig, PolicyLossType
from openppo.experience.measure import measure_mismatch
from openppo.models.loss import (
    POLICY_LOSSES,
    CISPOLoss,
    DecoupledLoss,
    DoubleSidedLoss,
    GSPOLoss,
    PolicyLoss,
    ValueLoss,
    policy_loss,
    policy_ratio,
    rollout_correction,
    token_weights,
)
from openppo.tracking import Metrics
from openppo.types import SingleProcess

MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()


def inputs(seed=0, spread=0.5):
    """Three float64 tensors of the mask's shape, the first two close to each other."""
    generator = torch.Generator().manual_seed(seed)
    first, noise, third = torch.randn(3, *MASK.shape, generator=generator, dtype=torch.float64)
    return first - 1, first - 1 + spread * noise, third


def surrogate(ratio, advantage, low, high, dual=None):
    loss = max(-ratio * advantage, -max(1 - low, min(1 + high, ratio)) * advantage)
    return min(loss, -dual * advantage) if dual is not None and advantage < 0 else loss


def by_token(*clip):
    return lambda row: [surrogate(math.exp(new - old), a, *clip) for new, old, a in row]


def by_sequence(*clip):
    """One ratio: the geometric mean of the token ratios."""

    def losses(row):
        ratio = math.prod(math.exp(new - old) for new, old, _ in row) ** (1 / max(len(row), 1))
        return [surrogate(ratio, a, *clip) for *_, a in row]

    return losses


def truncated(row):
    return [-min(math.exp(new - old), 1.5) * a * new for new, old, a in row]


def squared(row):
    return [0.5 * (value - target) ** 2 for value, _, target in row]


def clipped_squared(row):
    moved = [(max(old - 0.2, min(old + 0.2, value)), value, target) for value, old, target in row]
    return [
        0.5 * max((clipped - target) ** 2, (value - target) ** 2)
        for clipped, value, target in moved
    ]


LOSSES = {
    "ppo": (PolicyLoss, (0.2,), by_token(0.2, 0.2)),
    "clip higher": (PolicyLoss, (0.2, 0.28), by_token(0.2, 0.28)),
    "dual clip": (PolicyLoss, (0.2, None, 1.2), by_token(0.2, 0.2, 1.2)),
    "gspo": (GSPOLoss, (0.05, 0.08), by_sequence(0.05, 0.08)),
    "gspo dual clip": (GSPOLoss, (0.05, 0.08, 1.2), by_sequence(0.05, 0.08, 1.2)),
    "cispo": (CISPOLoss, (1.5,), truncated),
    "value": (ValueLoss, (), squared),
    "clipped value": (ValueLoss, (0.2,), clipped_squared),
}
EVERY = pytest.mark.parametrize(("kind", "options", "naive"), LOSSES.values(), ids=LOSSES)


@EVERY
def test_a_loss_equals_a_loop_over_action_tokens(kind, options, naive):
    tensors = inputs()
    rows = [
        naive(list(zip(*(t[b, MASK[b]].tolist() for t in tensors), strict=True)))
        for b in range(len(MASK))
    ]
    tokens = torch.zeros(MASK.shape, dtype=torch.float64)
    tokens[MASK] = torch.tensor([loss for row in rows for loss in row], dtype=torch.float64)
    expected = {
        "none": tokens,  # 0 outside the mask
        "token_mean": tokens.sum() / 7,
        "sequence_mean": torch.tensor(
            sum(sum(row) / max(len(row), 1) for row in rows) / 3, dtype=torch.float64
        ),
    }
    for reduction, loss in expected.items():
        found = kind(*options, reduction=reduction)(*tensors, MASK)
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-9)
    assert torch.equal(
        kind(*options)(*tensors, MASK), kind(*options, reduction="sequence_mean")(*tensors, MASK)
    )
    everywhere = torch.ones_like(MASK)
    assert torch.equal(kind(*options)(*tensors), kind(*options)(*tensors, everywhere))


@EVERY
@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean", "none"])
def test_what_lies_outside_the_mask_changes_neither_loss_nor_gradient(
    kind, options, naive, reduction
):
    def loss_and_gradient(outside, place):
        tensors = list(inputs(2))
        tensors[place] = torch.where(MASK, tensors[place], outside)
        tensors[0].requires_grad_()
        loss = kind(*options, reduction=reduction)(*tensors, MASK)
        return loss.detach(), *torch.autograd.grad(loss.sum(), tensors[0])

    expected = loss_and_gradient(0.25, 0)
    for place in range(3):
        for strange in (math.nan, math.inf, -math.inf):
            assert all(map(torch.equal, loss_and_gradient(strange, place), expected))
    assert bool((expected[1][~MASK] == 0).all())
    assert bool((expected[1][MASK] != 0).any())


def test_the_log_ratio_is_clamped_to_twenty():
    ratio = policy_ratio(
        torch.tensor([[50.0, -50.0, 19.0]], dtype=torch.float64), torch.zeros(1, 3)
    )
    assert ratio[0].tolist() == pytest.approx(
        [485165195.40979, 2.061153622438558e-09, 178482300.963187], rel=1e-12
    )
    for loss in (PolicyLoss(), GSPOLoss(), CISPOLoss()):
        far = torch.full((1, 2), 1000.0, requires_grad=True)
        value = loss(far, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]))
        assert math.isfinite(value.item())
        assert bool(torch.autograd.grad(value, far)[0].isfinite().all())


def one(number):
    return torch.tensor([[number]], dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "options", "numbers", "loss", "slope"),
    [  # log-prob, old log-prob, advantage; inside the clip range the slope by the log-prob is -r A
        (PolicyLoss, (0.2,), (math.log(1.1), 0.0, 2.0), -2.2, -2.2),
        (
            PolicyLoss,
            (0.2,),
            (math.log(1.5), 0.0, 2.0),
            -2.4,
            0.0,
        ),  # better than allowed: clipped at 1.2
        (PolicyLoss, (0.2,), (math.log(0.5), 0.0, 2.0), -1.0, -1.0),  # got worse: not clipped
        (
            PolicyLoss,
            (0.2, None, 3.0),
            (math.log(5.0), 0.0, -2.0),
            6.0,
            0.0,
        ),  # beyond the dual clip
        (
            CISPOLoss,
            (5.0,),
            (math.log(9.0), 0.0, 2.0),
            -10 * math.log(9),
            -10.0,
        ),  # min(r, 5) is a constant weight
        # value, old value, return
        (ValueLoss, (0.2,), (1.0, 1.0, 3.0), 2.0, -2.0),  # unchanged value: plain squared error
        (
            ValueLoss,
            (0.2,),
            (1.5, 1.0, 3.0),
            1.62,
            0.0,
        ),  # moved 0.5 towards the return, only 0.2 count
        (ValueLoss, (0.2,), (0.5, 1.0, 3.0), 3.125, -2.5),  # moved away: not clipped
        (
            ValueLoss,
            (0.2,),
            (2.0, 1.0, 1.0),
            0.5,
            1.0,
        ),  # moved past the clip range, away from the return
        (ValueLoss, (), (1.5, 100.0, 3.0), 1.125, -1.5),
    ],
)
def test_loss_and_slope_by_hand(kind, options, numbers, loss, slope):
    new, old, target = map(one, numbers)
    found = kind(*options)(new, old.detach(), target.detach())
    assert (found.item(), torch.autograd.grad(found, new)[0].item()) == pytest.approx(
        (loss, slope), abs=1e-9
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (PolicyLoss(0.2, 0.28), [True, False, True, False]),
        (GSPOLoss(0.2, 0.28), [False, False, False, False]),  # the mean log-ratio is log(0.972)
        (GSPOLoss(0.02, 0.03), [True, True, True, False]),
        (CISPOLoss(1.24), [False, True, False, False]),
        (ValueLoss(0.25), [True, False, False, False]),  # moved by -0.357, 0.223, -0.239
        (ValueLoss(), [False] * 4),
    ],
)
def test_clipped_says_which_tokens_reached_a_bound(loss, expected):
    ratios, mask = (
        torch.tensor([[0.7, 1.25, 1.05 * 0.75, 99.0]]),
        torch.tensor([[True, True, True, False]]),
    )
    assert loss.clipped(ratios.log(), torch.zeros(1, 4), mask)[0].tolist() == expected


def test_options_reach_the_losses_and_a_wide_clip_range_of_gspo_is_pointed_out(caplog):
    with caplog.at_level(logging.WARNING, logger="openppo"):
        policy_loss(LossConfig(policy_loss_type="gspo", eps_clip=3e-4, eps_clip_high=4e-4))
        assert caplog.text == ""
        policy_loss(LossConfig(policy_loss_type="gspo"))
    assert "--eps_clip 0.2 clips next to nothing" in caplog.text
    assert set(POLICY_LOSSES) == set(get_args(PolicyLossType))
    clips = {"eps_clip": 0.1, "eps_clip_high": 0.3, "dual_clip": 4.0}
    clipped = {"clip_eps": 0.1, "clip_eps_high": 0.3, "dual_clip": 4.0, "reduction": "none"}
    for name, kind, expected in (
        ("ppo", PolicyLoss, clipped),
        ("gspo", GSPOLoss, clipped),
        ("cispo", CISPOLoss, {"eps_max": 0.3, "reduction": "none"}),
        ("double_sided", DoubleSidedLoss, {**clipped, "dual_clip": None}),
        ("decoupled", DecoupledLoss, clipped),
    ):
        loss = policy_loss(LossConfig(policy_loss_type=name, **clips))
        assert type(loss) is kind
        assert vars(loss).items() >= expected.items()
    unset = policy_loss(LossConfig(policy_loss_type="double_sided"))
    assert (unset.clip_eps, unset.clip_eps_high) == (0.2, 0.28)
    assert policy_loss(LossConfig(policy_loss_type="cispo")).eps_max == 5.0


@pytest.mark.parametrize(
    ("loss_agg", "expected"),
    [("token_mean", 28 / 7), ("sequence_mean", (6 / 3 + 22 / 4) / 2), ("constant", 28 / (2 * 10))],
)
def test_token_losses_add_up_by_hand_and_rows_without_actions_do_not_count(loss_agg, expected):
    losses = torch.tensor([[9.0, 1, 2, 9, 3], [9.0, 9, 9, 9, 9], [9.0, 4, 5, 6, 7]])
    weights = token_weights(MASK, loss_agg, n_tokens=7, n_sequences=2, max_len=10)
    assert weights.dtype == torch.float32
    assert (losses * weights).sum().item() == pytest.approx(expected, abs=1e-6)
    assert bool((weights[~MASK] == 0).all())
    assert torch.equal(token_weights(MASK, loss_agg, 7.0, 2.0, 10, torch.ones(3)), weights), (
        "bit for bit"
    )
    assert bool((token_weights(torch.zeros(2, 3), loss_agg, 0, 0, 5) == 0).all())


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="token_mean, sequence_mean or constant, got 'mean'"):
        token_weights(MASK, "mean", 7, 2, 10)  # type: ignore[arg-type]
    for loss in (PolicyLoss(reduction="mean"), ValueLoss(reduction="mean")):
        with pytest.raises(ValueError, match="sequence_mean, token_mean or none, got 'mean'"):
            loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), None)


K = torch.tensor(
    [[0.4, 0.49, 0.51, 1.9, 2.5, 6.0, 3.0]], dtype=torch.float64
)  # pi_old / pi_rollout
CORRECTED = torch.tensor([[1, 1, 1, 1, 1, 1, 0]]).bool()
ROLLOUT = torch.full_like(K, -1.5)
LOG_PROBS = ROLLOUT + K.log()


@pytest.mark.parametrize(
    ("method", "low", "high", "expected"),
    [
        ("none", None, None, [1, 1, 1, 1, 1, 1, 0]),
        ("tis", None, None, [0.4, 0.49, 0.51, 1.9, 2, 2, 0]),
        ("mis", None, None, [0, 0, 0.51, 1.9, 0, 0, 0]),
        ("icepop", None, None, [0, 0, 0.51, 1.9, 2.5, 0, 0]),
        ("tis", None, 1.5, [0.4, 0.49, 0.51, 1.5, 1.5, 1.5, 0]),
        ("mis", 0.3, 7.0, [0.4, 0.49, 0.51, 1.9, 2.5, 6, 0]),
    ],
)
def test_weights_by_hand_without_gradient_or_what_lies_outside_the_mask(
    method, low, high, expected
):
    log_probs = torch.where(CORRECTED, LOG_PROBS, math.nan).requires_grad_()
    found = rollout_correction(
        log_probs, torch.where(CORRECTED, ROLLOUT, math.inf), CORRECTED, method, low, high
    )
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert not found.requires_grad
    far = torch.tensor([[900.0]])
    assert (
        rollout_correction(far, torch.zeros(1, 1), torch.ones(1, 1).bool(), "tis").item() == 2.0
    ), "finite"
    with pytest.raises(ValueError, match="none, tis, mis, icepop, got 'clip'"):
        rollout_correction(LOG_PROBS, ROLLOUT, CORRECTED, "clip")  # type: ignore[arg-type]


def test_mismatch_metrics_by_hand():
    ks = K[0, :6].tolist()
    gaps = [abs(math.log(k)) for k in ks]
    actor, engine = (tensor[0, :6].exp().tolist() for tensor in (LOG_PROBS, ROLLOUT))
    chances = [abs(mine - other) for mine, other in zip(actor, engine, strict=True)]
    metrics = Metrics()
    measure_mismatch(LOG_PROBS, ROLLOUT, CORRECTED, metrics)
    assert metrics.reduced(SingleProcess()) == pytest.approx(
        {
            "rollout_kl": statistics.mean(
                k - 1 - math.log(k) for k in ks
            ),  # k3 of samples of the engine
            "rollout_kl_k1": statistics.mean(-math.log(k) for k in ks),
            "rollout_ratio_max": 6.0,
            "rollout_log_prob_gap": statistics.mean(gaps),
            "rollout_log_prob_gap_max": max(gaps),
            "rollout_prob_gap": statistics.mean(chances),
            "rollout_prob_gap_max": max(chances),
            "rollout_prob_gap_std": statistics.pstdev(chances),
        },
        abs=1e-6,
    )
