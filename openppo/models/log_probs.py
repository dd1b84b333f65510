"""Log-probs and entropy of chosen tokens, in float32 and without a float32 copy of all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits handled at a time, in elements: bounds the float32 copies to 64 MiB each."""
CHUNK_ELEMENTS_ON_CPU = 1 << 20
"""There they stay in the cache: a forward takes a third of the time."""


def _chunks(logits: Tensor) -> list[slice]:
    most = CHUNK_ELEMENTS_ON_CPU if logits.device.type == "cpu" else CHUNK_ELEMENTS
    rows = max(1, most // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


class _SelectedLogProbs(torch.autograd.Function):
    """Saves the logits in their own dtype and the log-sum-exp; recomputes the softmax in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        """``logits`` (N, V), ``labels`` (N,); returns float32 (N,)."""
        normalizer = torch.empty(logits.shape[0], dtype=_accumulation(logits), device=logits.device)
        for rows in _chunks(logits):
            normalizer[rows] = torch.logsumexp(logits[rows].to(normalizer.dtype) / temperature, dim=-1)
        chosen = logits.gather(-1, labels[:, None])[:, 0].to(normalizer.dtype) / temperature
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.temperature = temperature
        return chosen - normalizer

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """d log p(label) / d logit = (1[label] - p) / temperature."""
        logits, labels, normalizer = ctx.saved_tensors
        scale = (grad_outputs[0] / ctx.temperature)[:, None]
        grad = torch.empty_like(logits)
        for rows in _chunks(logits):
            probs = (logits[rows].to(normalizer.dtype) / ctx.temperature - normalizer[rows, None]).exp_()
            part = probs.mul_(-scale[rows])
            part.scatter_add_(-1, labels[rows, None], scale[rows])
            grad[rows] = part.to(grad.dtype)
        return grad, None, None


def _accumulation(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at ``labels``: (..., V) and int64 (...) to float32 (...)."""
    flat = _SelectedLogProbs.apply(logits.flatten(0, -2), labels.flatten(), temperature)
    return flat.view(labels.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): (..., V) to float32 (...). Differentiable."""
    flat = logits.flatten(0, -2)
    parts = []
    for rows in _chunks(flat):
        probs = torch.softmax(flat[rows].to(_accumulation(logits)) / temperature, dim=-1)
        probs = probs.clamp(min=torch.finfo(probs.dtype).tiny)  # at 0 the slope of entr is infinite
        parts.append(torch.special.entr(probs).sum(-1))
    return torch.cat(parts).view(logits.shape[:-1])
