"""Weights for the difference between the rollout engine and the training actor, worked out by hand."""

import math
import statistics

import pytest
import torch

from openppo.experience.measure import measure_mismatch
from openppo.models.loss import rollout_correction
from openppo.tracking import Metrics
from openppo.types import SingleProcess

K = torch.tensor([[0.4, 0.49, 0.51, 1.9, 2.5, 6.0, 3.0]], dtype=torch.float64)  # pi_old / pi_rollout
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 0]]).bool()
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
def test_weights_by_hand_without_gradient_or_what_lies_outside_the_mask(method, low, high, expected):
    log_probs = torch.where(MASK, LOG_PROBS, math.nan).requires_grad_()
    found = rollout_correction(log_probs, torch.where(MASK, ROLLOUT, math.inf), MASK, method, low, high)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert not found.requires_grad


def test_a_huge_ratio_is_a_finite_weight_and_an_unknown_method_is_refused():
    far = torch.tensor([[900.0]])
    assert rollout_correction(far, torch.zeros(1, 1), torch.ones(1, 1).bool(), "tis").item() == 2.0
    with pytest.raises(ValueError, match="none, tis, mis, icepop, got 'clip'"):
        rollout_correction(LOG_PROBS, ROLLOUT, MASK, "clip")  # type: ignore[arg-type]


def test_mismatch_metrics_by_hand():
    ks = K[0, :6].tolist()
    gaps = [abs(math.log(k)) for k in ks]
    metrics = Metrics()
    measure_mismatch(LOG_PROBS, ROLLOUT, MASK, metrics)
    assert metrics.reduced(SingleProcess()) == pytest.approx(
        {
            "rollout_kl": statistics.mean(k - 1 - math.log(k) for k in ks),  # k3 of samples of the engine
            "rollout_kl_k1": statistics.mean(-math.log(k) for k in ks),
            "rollout_ratio_max": 6.0,
            "rollout_log_prob_gap": statistics.mean(gaps),
            "rollout_log_prob_gap_max": max(gaps),
        },
        abs=1e-6,
    )
