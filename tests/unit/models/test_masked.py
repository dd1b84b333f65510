"""Masked means and KL estimates, against numbers worked out by hand and exact expectations."""

import math

import pytest
import torch

from openppo.models.log_probs import compute_approx_kl, masked_mean, masked_sum

NUMBERS = torch.tensor([[1.0, 2.0, 6.0], [10.0, 20.0, 40.0]])
MASK = torch.tensor([[True, False, True], [False, True, False]])
NOT_FINITE = [math.nan, math.inf, -math.inf]


def test_the_mean_counts_masked_elements_only():
    assert masked_mean(NUMBERS, MASK).item() == 9.0  # (1 + 6 + 20) / 3
    assert masked_sum(NUMBERS, MASK).item() == 27.0


def test_the_mean_along_a_dimension_is_one_per_sequence():
    assert masked_mean(NUMBERS, MASK, dim=-1).tolist() == [3.5, 20.0]
    assert masked_sum(NUMBERS, MASK, dim=-1).tolist() == [7.0, 20.0]


def test_without_a_mask_everything_counts():
    assert masked_mean(NUMBERS, None).item() == pytest.approx(79 / 6)
    assert masked_mean(NUMBERS, None, dim=-1).tolist() == pytest.approx([3.0, 70 / 3])
    assert masked_sum(NUMBERS, None, dim=-1).tolist() == [9.0, 70.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_of_numbers_is_as_good_as_a_boolean_one(dtype):
    assert masked_mean(NUMBERS, MASK.to(dtype), dim=-1).tolist() == [3.5, 20.0]


def test_the_mean_of_nothing_is_zero():
    mask = torch.tensor([[False, False, False], [True, True, False]])
    assert masked_mean(NUMBERS, mask, dim=-1).tolist() == [0.0, 15.0]
    assert masked_mean(NUMBERS, torch.zeros_like(mask)).item() == 0.0


@pytest.mark.parametrize("strange", NOT_FINITE)
def test_what_lies_outside_the_mask_reaches_neither_value_nor_gradient(strange):
    numbers = torch.where(MASK, NUMBERS, strange).requires_grad_()
    mean = masked_mean(numbers, MASK)
    mean.backward()
    assert mean.item() == 9.0
    third = 1 / 3
    assert numbers.grad is not None
    torch.testing.assert_close(numbers.grad, torch.tensor([[third, 0.0, third], [0.0, third, 0.0]]))


def test_kl_estimates_equal_numbers_worked_out_by_hand():
    log_probs, reference = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -3.0]])
    expected = {
        "k1": [0.5, -1.0, 0.0],
        "k2": [0.125, 0.5, 0.0],
        "k3": [0.10653065971263342, 0.7182818284590451, 0.0],  # e^-0.5 - 1 + 0.5, e^1 - 1 - 1
    }
    for estimator, numbers in expected.items():
        estimate = compute_approx_kl(log_probs, reference, kl_estimator=estimator)
        assert estimate[0].tolist() == pytest.approx(numbers, abs=1e-6), estimator


def test_k3_of_a_tiny_difference_keeps_its_digits():
    log_probs, reference = torch.tensor([[0.0]]), torch.tensor([[-1e-4]])
    assert compute_approx_kl(log_probs, reference, kl_estimator="k3").item() == pytest.approx(5e-9, rel=5e-3)


def test_log_probs_in_bfloat16_are_compared_in_float32():
    log_probs = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    reference = torch.tensor([[-0.0009765625]], dtype=torch.bfloat16)  # lost if the difference were bfloat16
    estimate = compute_approx_kl(log_probs, reference)
    assert estimate.dtype == torch.float32
    assert estimate.item() == -0.9990234375


@pytest.mark.parametrize("strange", NOT_FINITE)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_estimate_is_zero_outside_the_mask_and_has_no_gradient_there(estimator, strange):
    log_probs = torch.tensor([[-1.0, strange, -2.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True]])
    estimate = compute_approx_kl(log_probs, torch.tensor([[-1.5, -1.0, -1.0]]), mask, estimator)
    estimate.sum().backward()
    slope = {"k1": [1.0, 0.0, 1.0], "k2": [0.5, 0.0, -1.0], "k3": [1 - math.exp(-0.5), 0.0, 1 - math.e]}[estimator]
    assert estimate[0, 1].item() == 0.0
    assert bool(estimate.isfinite().all())
    assert log_probs.grad is not None
    assert log_probs.grad[0].tolist() == pytest.approx(slope, abs=1e-6)


POLICY = [0.1, 0.2, 0.3, 0.4]
REFERENCE = [0.25, 0.25, 0.4, 0.1]
EXACT_KL = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))


def estimates_of_each_outcome(estimator):
    policy, reference = torch.tensor([POLICY], dtype=torch.float64), torch.tensor([REFERENCE], dtype=torch.float64)
    return compute_approx_kl(policy.log(), reference.log(), kl_estimator=estimator)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_expectation_of_k1_and_of_k3_is_the_exact_kl(estimator):
    expectation = (estimates_of_each_outcome(estimator).double() * torch.tensor(POLICY)).sum().item()
    assert expectation == pytest.approx(EXACT_KL, abs=1e-6)


def test_k2_and_k3_are_never_negative_and_k1_may_be():
    assert estimates_of_each_outcome("k1").min() < 0
    assert estimates_of_each_outcome("k2").min() >= 0
    assert estimates_of_each_outcome("k3").min() >= 0


def test_an_unknown_kl_estimator_is_refused_by_name():
    with pytest.raises(ValueError, match="k1, k2 or k3, got 'k4'"):
        compute_approx_kl(torch.zeros(1, 1), torch.zeros(1, 1), kl_estimator="k4")
