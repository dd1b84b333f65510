"""Weights for the difference between the rollout engine and the training actor, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openppo.models.rollout_correction import mismatch_metrics, rollout_correction

K = torch.tensor([[0.4, 0.6, 1.0, 1.9, 2.5, 6.0, 3.0]], dtype=torch.float64)  # pi_old / pi_rollout
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 0]]).bool()
ROLLOUT = torch.full_like(K, -1.5)
LOG_PROBS = ROLLOUT + K.log()


def weights(method: str, low: float | None = None, high: float | None = None) -> list[float]:
    return rollout_correction(LOG_PROBS, ROLLOUT, MASK, method, low, high)[0].tolist()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("none", [1, 1, 1, 1, 1, 1, 0]),
        ("tis", [0.4, 0.6, 1, 1.9, 2, 2, 0]),
        ("mis", [0, 0.6, 1, 1.9, 0, 0, 0]),
        ("icepop", [0, 0.6, 1, 1.9, 2.5, 0, 0]),
    ],
)
def test_weights_with_the_default_thresholds(method: str, expected: list[float]) -> None:
    assert weights(method) == pytest.approx(expected, abs=1e-6)


def test_the_default_ranges() -> None:
    def range_of(method: str) -> tuple[float, float]:
        """Smallest and largest weight of a fine grid of ratios."""
        grid = torch.linspace(-4, 4, 8001, dtype=torch.float64)[None]
        found = rollout_correction(grid, torch.zeros_like(grid), torch.ones_like(grid).bool(), method)
        return found[found > 0].min().item(), found.max().item()

    assert range_of("tis") == pytest.approx((math.exp(-4), 2.0), abs=1e-2)
    assert range_of("mis") == pytest.approx((0.5, 2.0), abs=1e-2)
    assert range_of("icepop") == pytest.approx((0.5, 5.0), abs=1e-2)


def test_thresholds_can_be_chosen() -> None:
    assert weights("tis", high=1.5) == pytest.approx([0.4, 0.6, 1, 1.5, 1.5, 1.5, 0])
    assert weights("mis", 0.3, 7.0) == pytest.approx([0.4, 0.6, 1, 1.9, 2.5, 6, 0])


@pytest.mark.parametrize("method", ["none", "tis", "mis", "icepop"])
def test_weights_carry_no_gradient_and_ignore_what_lies_outside_the_mask(method: str) -> None:
    log_probs = torch.where(MASK, LOG_PROBS, math.nan).requires_grad_()
    rollout = torch.where(MASK, ROLLOUT, math.inf)
    found = rollout_correction(log_probs, rollout, MASK, method)
    assert not found.requires_grad
    assert torch.equal(found, rollout_correction(LOG_PROBS, ROLLOUT, MASK, method))


def test_a_huge_ratio_is_a_finite_weight() -> None:
    far = torch.tensor([[900.0]])
    assert rollout_correction(far, torch.zeros(1, 1), torch.ones(1, 1).bool(), "tis").item() == 2.0


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="none, tis, mis, icepop, got 'clip'"):
        rollout_correction(LOG_PROBS, ROLLOUT, MASK, "clip")  # type: ignore[arg-type]


def test_mismatch_metrics_by_hand() -> None:
    found = {name: (tensor, reduce) for name, tensor, reduce in mismatch_metrics(LOG_PROBS, ROLLOUT, MASK)}
    kl = [k - 1 - math.log(k) for k in K[0, :6].tolist()]  # k3 of samples of the engine
    assert found["rollout_kl"][0][0].tolist() == pytest.approx([*kl, 0], abs=1e-6)
    assert found["rollout_ratio_max"][0].max().item() == pytest.approx(6.0)
    assert found["rollout_ratio_max"][1] == "max"
    gap = [abs(math.log(k)) for k in K[0, :6].tolist()]
    assert found["rollout_log_prob_gap"][0][0].tolist() == pytest.approx([*gap, 0], abs=1e-6)
    assert found["rollout_log_prob_gap"][1] == "mean"
    assert found["rollout_log_prob_gap_max"][0].max().item() == pytest.approx(max(gap), abs=1e-6)
    assert found["rollout_log_prob_gap_max"][1] == "max"
    k1 = [-math.log(k) for k in K[0, :6].tolist()]
    assert found["rollout_kl_k1"][0][0].tolist() == pytest.approx([*k1, 0], abs=1e-6)


def test_the_kl_estimate_is_unbiased_under_the_engines_samples() -> None:
    rollout, actor = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6]))
    every = torch.ones(1, 3).bool()
    estimates: Tensor = mismatch_metrics(actor.log()[None], rollout.log()[None], every)[0][1]
    exact = (rollout * (rollout / actor).log()).sum()
    assert (rollout * estimates[0]).sum().item() == pytest.approx(exact.item(), abs=1e-6)
