"""Log-probs, entropy, masked means and KL estimates against definitions in float64 and numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from openppo.models import log_probs as module
from openppo.models.log_probs import (
    compute_approx_kl,
    entropy_from_logits,
    log_probs_and_entropy,
    log_probs_from_logits,
    masked_mean,
    masked_sum,
)

ROWS, VOCAB = 7, 11
NOT_FINITE = [math.nan, math.inf, -math.inf]


def random_logits(dtype, scale=4.0):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def by_definition(logits, labels, temperature):
    log_probs = torch.log_softmax(logits.double() / temperature, -1)
    return torch.stack([row[label] for row, label in zip(log_probs, labels.tolist(), strict=True)])


@pytest.fixture(
    params=[1, 3 * VOCAB, 1 << 24]
)  # elements: a row at a time, three rows at a time, all at once
def chunked(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_ON_CPU", request.param)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_entropy_and_gradient_equal_the_definition_in_float64(dtype, temperature):
    logits, labels = random_logits(dtype)
    leaf, exact_leaf = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, exact = (
        log_probs_from_logits(leaf, labels, temperature),
        by_definition(exact_leaf, labels, temperature),
    )
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=5e-7, atol=1e-6)
    entropy = entropy_from_logits(logits, temperature)
    expected = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
    torch.testing.assert_close(entropy.double(), expected, rtol=0, atol=1e-6)
    weights = torch.linspace(-2, 3, ROWS, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found.double() * weights).sum(), leaf)
    (exact_gradient,) = torch.autograd.grad((exact * weights).sum(), exact_leaf)
    rounding = (
        2**-8 if dtype == torch.bfloat16 else 1e-6
    )  # half a unit in the last place of the gradient's own dtype
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=rounding, atol=1e-6)


@pytest.mark.usefixtures("chunked")
def test_gradcheck_agrees_with_log_probs_and_entropy_of_any_leading_dimensions():
    logits, labels = (x[:6].unflatten(0, (2, 3)) for x in random_logits(torch.float64, scale=1.0))
    logits.requires_grad_()
    assert (
        log_probs_from_logits(logits, labels).shape == entropy_from_logits(logits).shape == (2, 3)
    )
    assert torch.autograd.gradcheck(lambda x: log_probs_from_logits(x, labels, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, labels, 0.7), logits)


def test_huge_logits_and_minus_infinity_stay_exact():
    logits = torch.tensor([1e4, 1e4 - 1, -1e4, 0.0]).expand(4, 4)  # their exponentials overflow
    log_probs = log_probs_from_logits(logits, torch.arange(4))
    assert log_probs.exp().sum().item() == pytest.approx(
        1.0, abs=1e-3
    )  # float32 has steps of 1e-3 at 1e4
    logits = torch.tensor([[0.0, -math.inf, math.log(3.0)]] * 2, requires_grad=True)
    found = log_probs_from_logits(logits, torch.tensor([2, 1]))
    assert found.tolist() == pytest.approx([math.log(0.75), -math.inf], abs=1e-6)
    (gradient,) = torch.autograd.grad(found[0], logits)
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.0, 0.25], abs=1e-6)


@pytest.mark.parametrize("unlikely", [-math.inf, -200.0])
def test_entropy_and_its_gradient_by_hand_beside_tokens_of_probability_zero(unlikely):
    logits = torch.tensor(
        [[0.0, math.log(3.0), unlikely]], requires_grad=True
    )  # e^-200 is 0 in float32
    found = entropy_from_logits(logits)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    slopes = [
        -p * (math.log(p) + entropy) for p in (0.25, 0.75)
    ]  # dH / d logit_i = -p_i (log p_i + H)
    assert found.item() == pytest.approx(entropy, abs=1e-6)
    assert torch.autograd.grad(found, logits)[0][0].tolist() == pytest.approx(
        [*slopes, 0.0], abs=1e-6
    )


@pytest.mark.parametrize("function", [log_probs_from_logits, log_probs_and_entropy])
def test_the_backward_pass_keeps_the_logits_and_nothing_else_of_their_size(function):
    logits, labels = random_logits(torch.bfloat16)
    logits.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        function(logits, labels, 0.7)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [(tensor.dtype, tensor.data_ptr()) for tensor in large] == [
        (torch.bfloat16, logits.data_ptr())
    ]
    small = sum(tensor.numel() for tensor in saved if tensor.dtype == torch.float32)
    assert small == (0 if function is log_probs_from_logits else ROWS)  # the entropy


NUMBERS = torch.tensor([[1.0, 2.0, 6.0], [10.0, 20.0, 40.0], [3.0, 4.0, 5.0]])
MASK = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])


@pytest.mark.parametrize("mask", [MASK, MASK.long(), MASK.float()])
@pytest.mark.parametrize("strange", [0.0, *NOT_FINITE])
def test_masked_sums_and_means_by_hand_whatever_lies_outside(mask, strange):
    numbers = torch.where(MASK, NUMBERS, strange).requires_grad_()
    mean = masked_mean(numbers, mask)
    assert (mean.item(), masked_sum(numbers, mask).item()) == (9.0, 27.0)  # (1 + 6 + 20) / 3
    torch.testing.assert_close(torch.autograd.grad(mean, numbers)[0], MASK / 3)
    assert masked_mean(numbers, mask, dim=-1).tolist() == [3.5, 20.0, 0.0]  # of nothing: 0
    assert masked_sum(numbers, mask, dim=-1).tolist() == [7.0, 20.0, 0.0]
    assert masked_mean(NUMBERS, torch.zeros_like(mask)).item() == 0.0
    assert masked_mean(NUMBERS, None).item() == pytest.approx(91 / 9)
    assert masked_mean(NUMBERS, None, dim=-1).tolist() == pytest.approx([3.0, 70 / 3, 4.0])


KL = {  # log-probs -1, -2, -3 against -1.5, -1, -3: estimates and slopes
    "k1": ([0.5, -1.0, 0.0], [1.0, 1.0, 1.0]),
    "k2": ([0.125, 0.5, 0.0], [0.5, -1.0, 0.0]),
    "k3": ([math.exp(-0.5) - 0.5, math.e - 2, 0.0], [1 - math.exp(-0.5), 1 - math.e, 0.0]),
}


@pytest.mark.parametrize("strange", NOT_FINITE)
@pytest.mark.parametrize("estimator", KL)
def test_kl_estimates_and_slopes_by_hand_and_zero_outside_the_mask(estimator, strange):
    log_probs = torch.tensor([[-1.0, -2.0, -3.0, strange]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False]])
    estimate = compute_approx_kl(
        log_probs, torch.tensor([[-1.5, -1.0, -3.0, -1.0]]), mask, estimator
    )
    values, slopes = KL[estimator]
    assert estimate[0].tolist() == pytest.approx([*values, 0.0], abs=1e-6)
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([*slopes, 0.0], abs=1e-6)


def test_kl_estimates_keep_their_digits():
    tiny = compute_approx_kl(torch.tensor([[0.0]]), torch.tensor([[-1e-4]]), kl_estimator="k3")
    assert tiny.item() == pytest.approx(5e-9, rel=5e-3)
    log_probs, reference = torch.tensor([[-1.0], [-0.0009765625]], dtype=torch.bfloat16)[:, None]
    estimate = compute_approx_kl(
        log_probs, reference
    )  # would be lost if the difference were bfloat16
    assert (estimate.dtype, estimate.item()) == (torch.float32, -0.9990234375)
    with pytest.raises(ValueError, match="k1, k2 or k3, got 'k4'"):
        compute_approx_kl(torch.zeros(1, 1), torch.zeros(1, 1), kl_estimator="k4")


@pytest.mark.parametrize("at_once", [1, 3 * VOCAB, 1 << 29])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs_from_hidden_states_equal_those_of_whole_logits(monkeypatch, at_once, bias):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE_ON_CPU", at_once)
    torch.manual_seed(2)
    head, hidden = (
        torch.nn.Linear(4, VOCAB, bias=bias).double(),
        torch.randn(ROWS, 4).double().requires_grad_(),
    )
    labels, leaves = torch.randint(0, VOCAB, (ROWS,)), [hidden, *head.parameters()]
    found = module.linear_log_probs(head, labels, 0.7, True, hidden)
    expected = torch.stack(log_probs_and_entropy(head(hidden), labels, 0.7), -1)
    weights = torch.randn(ROWS, 2).double()
    gradients = [torch.autograd.grad((x * weights).sum(), leaves) for x in (found, expected)]
    for one, other in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x, *_: module.linear_log_probs(head, labels, 0.7, True, x), leaves
    )


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Elements of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        self.size = max(self.size, output.numel() if isinstance(output, Tensor) else 0)
        return output


def test_logits_are_never_whole_where_they_are_many(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE_ON_CPU", 8 * VOCAB)
    head, hidden = torch.nn.Linear(4, VOCAB), torch.randn(64, 4, requires_grad=True)
    with Largest() as largest:
        module.linear_log_probs(
            head, torch.zeros(64, dtype=torch.int64), 1.0, True, hidden
        ).sum().backward()
    assert largest.size == 64 * 4, "hidden states; of logits, 8 rows of 11"
