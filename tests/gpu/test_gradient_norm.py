"""Gradient norms by torch's kernel for many tensors, which adds float32 and bfloat16 gradients in float64."""

import pytest
import torch
from torch import Tensor

from openppo.strategy.gradient_norm import norms
from tests.gpu.devices import DEVICES, DTYPES


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """A large one, a part of another, an empty one, tiny and huge numbers."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(1500, 700, generator=generator)
    shapes = [
        large,
        large.flatten()[7:1001],
        torch.empty(0),
        torch.full((5,), 1e-30),
        torch.full((3,), 3e38),
    ]
    return [gradient.to(dtype) for gradient in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_norms_are_those_of_copies_in_float64(device, dtype):
    expected = torch.stack([gradient.double().norm() for gradient in gradients(dtype)])
    measured = norms([gradient.to(device) for gradient in gradients(dtype)]).cpu()
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_one_number_that_is_not_finite_shows_in_the_norm(device, dtype, number):
    gradient = gradients(dtype)[0]
    gradient[1234, 567] = number
    measured = norms([gradient.to(device), torch.ones(3, dtype=dtype, device=device)]).cpu()
    assert measured.isfinite().tolist() == [False, True]
