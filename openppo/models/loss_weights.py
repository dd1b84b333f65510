"""Weights for summing the losses of tokens over an optimizer step. Needs torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from openppo.config import LossAggregation

Reduction = Literal["sequence_mean", "token_mean", "none"]


def token_weights(
    action_mask: Tensor,
    loss_agg: LossAggregation,
    n_tokens: float,
    n_sequences: float,
    max_len: int,
    weight: Tensor | None = None,
    fraction: Tensor | None = None,
) -> Tensor:
    """Weights (B, L) for summing the losses of tokens over an optimizer step, 0 outside ``action_mask``.

    Over the whole step, ``n_tokens`` counts the action tokens and ``n_sequences`` the rows that have any, each times
    its row's ``weight`` (B,) (None: 1). (loss * weights).sum() over the step is

    - for "token_mean" the mean over tokens;
    - for "sequence_mean" the mean over sequences of each one's mean;
    - for "constant" the sum divided by n_sequences * ``max_len`` (arXiv 2503.20783).

    A row may be part of a sequence, with a ``fraction`` (B,) of its tokens (None: 1); ``n_sequences`` counts the row as
    that fraction of a sequence. Returns float32, or the dtype of ``weight``.

    >>> action_mask = torch.tensor([[True, True, True], [True, False, False]])
    >>> token_weights(action_mask, "token_mean", n_tokens=4, n_sequences=2, max_len=3)
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.0000, 0.0000]])
    >>> token_weights(action_mask, "sequence_mean", n_tokens=4, n_sequences=2, max_len=3)
    tensor([[0.1667, 0.1667, 0.1667],
            [0.5000, 0.0000, 0.0000]])
    """
    mask = action_mask.bool()
    weighted = mask.float() if weight is None else mask * weight[:, None]  # (B, L)
    n_tokens = float(n_tokens) or 1.0
    n_sequences = float(n_sequences) or 1.0

    if loss_agg == "token_mean":
        return weighted / n_tokens
    if loss_agg == "sequence_mean":
        row_fraction: Tensor | float = 1.0 if fraction is None else fraction[:, None]
        row_tokens = mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
        return weighted * row_fraction / (row_tokens * n_sequences)
    if loss_agg == "constant":
        return weighted / (n_sequences * max_len)
    raise ValueError(f"loss_agg must be token_mean, sequence_mean or constant, got {loss_agg!r}")


def reduce_loss(loss: Tensor, action_mask: Tensor | None, reduction: Reduction) -> Tensor:
    """Mean of token losses (B, L) over this batch, or the losses themselves for "none".

    Losses outside ``action_mask`` are 0; so is the mean of a row without actions.
    """
    if reduction not in ("sequence_mean", "token_mean", "none"):
        raise ValueError(f"reduction must be sequence_mean, token_mean or none, got {reduction!r}")
    mask = torch.ones_like(loss, dtype=torch.bool) if action_mask is None else action_mask.bool()
    loss = torch.where(mask, loss, 0.0)
    if reduction == "none":
        return loss

    n_rows = len(loss)
    n_tokens = int(mask.sum())
    ones = loss.new_ones(n_rows)
    weights = token_weights(mask, reduction, n_tokens, n_sequences=n_rows, max_len=0, weight=ones)
    return (loss * weights).sum()
