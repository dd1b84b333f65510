"""Log-probs and entropy of logits against the definitions in float64, and what the backward pass keeps in memory."""

import math

import pytest
import torch
from torch import Tensor

from openppo.models import log_probs as module
from openppo.models.log_probs import entropy_from_logits, log_probs_and_entropy, log_probs_from_logits

ROWS, VOCAB = 7, 11
CHUNKS = [1, 3 * VOCAB, 1 << 24]  # elements: a row at a time, three rows at a time, all at once
TEMPERATURES = [1.0, 0.5, 1.7]


def random_logits(dtype, scale=4.0):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def by_definition(logits, labels, temperature):
    log_probs = torch.log_softmax(logits.double() / temperature, -1)
    return torch.stack([row[label] for row, label in zip(log_probs, labels.tolist(), strict=True)])


def gradient(function, logits, weights):
    leaf = logits.clone().requires_grad_()
    (function(leaf).double() * weights).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.fixture(params=CHUNKS)
def chunked(request, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_ON_CPU", request.param)


def test_log_probs_of_logits_made_from_known_probabilities():
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log() + 3.0  # probabilities 1/8, 2/8, 5/8
    for label, probability in enumerate([0.125, 0.25, 0.625]):
        found = log_probs_from_logits(logits, torch.tensor([label]))
        assert found.item() == pytest.approx(math.log(probability), abs=1e-6)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_equal_the_definition_in_float64(dtype, temperature):
    logits, labels = random_logits(dtype)
    found = log_probs_from_logits(logits, labels, temperature)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), by_definition(logits, labels, temperature), rtol=5e-7, atol=1e-6)


def test_leading_dimensions_are_kept():
    logits, labels = random_logits(torch.float64)
    shaped = log_probs_from_logits(logits[:6].view(2, 3, VOCAB), labels[:6].view(2, 3))
    torch.testing.assert_close(shaped, by_definition(logits[:6], labels[:6], 1.0).view(2, 3), rtol=0, atol=1e-12)
    assert entropy_from_logits(logits[:6].view(2, 3, VOCAB)).shape == (2, 3)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_equals_that_of_the_definition_in_float64(dtype, temperature):
    logits, labels = random_logits(dtype)
    weights = torch.linspace(-2, 3, ROWS, dtype=torch.float64)
    found = gradient(lambda x: log_probs_from_logits(x, labels, temperature), logits, weights)
    exact = gradient(lambda x: by_definition(x, labels, temperature), logits.double(), weights)
    assert found.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6  # half a unit in the last place of the gradient's own dtype
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-6)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradcheck_agrees_with_log_probs_and_entropy(temperature):
    logits, labels = random_logits(torch.float64, scale=1.0)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_from_logits(x, labels, temperature), logits)
    assert torch.autograd.gradcheck(lambda x: entropy_from_logits(x, temperature), logits)
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, labels, temperature), logits)


def test_probabilities_of_all_labels_sum_to_one_even_for_huge_logits():
    logits = torch.tensor([1e4, 1e4 - 1, -1e4, 0.0]).expand(4, 4)  # their exponentials overflow
    log_probs = log_probs_from_logits(logits, torch.arange(4))
    assert bool(log_probs.isfinite().all())
    assert log_probs.exp().sum().item() == pytest.approx(1.0, abs=1e-3)  # float32 has steps of 1e-3 at 1e4


def test_a_logit_of_minus_infinity_is_a_token_that_cannot_be_sampled():
    logits = torch.tensor([[0.0, -math.inf, math.log(3.0)]] * 2, requires_grad=True)
    found = log_probs_from_logits(logits, torch.tensor([2, 1]))
    assert found.tolist() == pytest.approx([math.log(0.75), -math.inf], abs=1e-6)
    found[0].backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.25, 0.0, 0.25], abs=1e-6)


@pytest.mark.parametrize("function", [log_probs_from_logits, log_probs_and_entropy])
def test_the_backward_pass_keeps_the_logits_themselves_and_nothing_else_of_their_size(function):
    logits, labels = random_logits(torch.bfloat16)
    logits.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        function(logits, labels, 0.7)
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [(tensor.dtype, tensor.data_ptr()) for tensor in large] == [(torch.bfloat16, logits.data_ptr())]
    small = sum(tensor.numel() for tensor in saved if tensor.dtype == torch.float32)
    assert small == (0 if function is log_probs_from_logits else ROWS)  # the entropy


def test_entropy_equals_numbers_worked_out_by_hand():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -math.inf, -math.inf], [5.0, -math.inf, 0, 0]])
    logits[2, 2:] = -math.inf
    two = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy_from_logits(logits).tolist() == pytest.approx([math.log(4), two, 0.0], abs=1e-6)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_equals_that_of_a_torch_categorical_in_float64(dtype, temperature):
    logits, _ = random_logits(dtype)
    found = entropy_from_logits(logits, temperature)
    exact = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("unlikely", [-math.inf, -200.0])
def test_the_gradient_of_entropy_is_finite_and_right_beside_tokens_of_probability_zero(unlikely):
    logits = torch.tensor([[0.0, math.log(3.0), unlikely]], requires_grad=True)  # e^-200 is 0 in float32
    entropy_from_logits(logits).sum().backward()
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    slopes = [-p * (math.log(p) + entropy) for p in (0.25, 0.75)]  # dH / d logit_i = -p_i (log p_i + H)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([*slopes, 0.0], abs=1e-6)
