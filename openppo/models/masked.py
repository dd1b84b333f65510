"""Means over masked tensors, and KL estimates. What lies outside a mask never matters, NaN included."""

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def masked_sum(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Sum of the elements where ``mask`` (same shape, bool or 0/1) is set; ``mask`` None counts all."""
    if mask is not None:
        tensor = torch.where(mask.bool(), tensor, 0.0)
    return tensor.sum() if dim is None else tensor.sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Mean of the elements where ``mask`` (same shape, bool or 0/1) is set; 0 where nothing is set.

    With ``dim=-1`` on (B, L) the result is one mean per sequence, (B,).
    """
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(tensor, mask, dim) / count.clamp(min=1)


def compute_approx_kl(
    log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor | None = None, kl_estimator: KLEstimator = "k1"
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy, (B, L).

    With x = log_probs - ref_log_probs: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x
    (http://joschu.net/blog/kl-approx.html). k1 and k3 are unbiased; k1 may be negative, k2 and k3 never are.
    0 where ``action_mask`` is not set.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)  # bfloat16 differences would be noise
    x = log_probs.to(dtype) - ref_log_probs.to(dtype)
    if action_mask is not None:
        x = torch.where(action_mask.bool(), x, 0.0)
    if kl_estimator == "k1":
        return x
    if kl_estimator == "k2":
        return x.square() / 2
    if kl_estimator == "k3":
        return torch.expm1(-x) + x
    raise ValueError(f"kl_estimator must be k1, k2 or k3, got {kl_estimator!r}")
