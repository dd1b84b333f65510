"""Weights for the difference between the policy that sampled and the one that is trained. Needs torch only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from openppo.models.log_probs import log_ratio, masked_mean, masked_sum

if TYPE_CHECKING:
    from openppo.config import CorrectionLevel, RolloutCorrection

DEFAULT_RANGES: dict[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "mis": (0.5, 2.0),
    "icepop": (0.5, 5.0),
}
"""Lower and upper threshold of each method of ``--rollout_correction``, for single tokens and whole sequences."""
GEOMETRIC_RANGE = (0.99, 1.01)
"""For geometric means, whatever the method: they lie near 1."""


class RatioRange(NamedTuple):
    """Tokens whose ``ratio`` (B, L) lies outside [low, high] are left out."""

    ratio: Tensor
    low: float
    high: float

    def kept(self) -> Tensor:
        """The ratio (B, L), 0 where a token is left out."""
        return torch.where((self.ratio >= self.low) & (self.ratio <= self.high), self.ratio, 0.0)


def correction_range(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    method: RolloutCorrection,
    low: float | None = None,
    high: float | None = None,
    level: CorrectionLevel = "token",
) -> RatioRange:
    """k = exp(log_probs - rollout_log_probs) of each token or its row, without gradient, and the range of ``method``.

    ``level`` "token": of each token; "sequence": the product over a row's action tokens; "geometric": its geometric
    mean. 1 outside the mask; log k is clamped to +-20. ``low`` and ``high`` default to ``DEFAULT_RANGES`` and
    ``GEOMETRIC_RANGE``. ``ValueError`` for unknown names.
    """
    if method not in DEFAULT_RANGES:
        raise ValueError(f"method must be none, {', '.join(DEFAULT_RANGES)}, got {method!r}")
    mask = action_mask.bool()
    (default_low, default_high) = DEFAULT_RANGES[method]
    log_k = log_ratio(log_probs, rollout_log_probs, mask).detach()  # (B, L)
    if level == "sequence":
        log_k = masked_sum(log_k, mask, -1)[:, None].clamp(-20.0, 20.0).expand_as(log_k)
    elif level == "geometric":
        log_k = masked_mean(log_k, mask, -1)[:, None].expand_as(log_k)
        default_low, default_high = GEOMETRIC_RANGE
    elif level != "token":
        raise ValueError(f"level must be token, sequence or geometric, got {level!r}")
    k = torch.where(mask, log_k, 0.0).exp()
    return RatioRange(
        k, default_low if low is None else low, default_high if high is None else high
    )


def rollout_correction(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    method: RolloutCorrection,
    low: float | None = None,
    high: float | None = None,
    level: CorrectionLevel = "token",
    veto: float | None = None,
) -> Tensor:
    """Weights of token losses for the k of ``correction_range``, (B, L), without gradient; 0 outside the mask.

    The engine samples from pi_rollout, ratios are against pi_old of the training actor; weights k = pi_old / pi_rollout
    make the loss unbiased. "tis" min(k, high), truncated importance sampling
    (https://fengyao.notion.site/off-policy-rl); "mis" k inside [low, high] and 0 outside, masked importance sampling
    (https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda);
    "icepop" the same with a wider upper default (https://ringtech.notion.site/icepop); "none" 1. A row with any token
    whose own k lies below ``veto`` has weight 0. Tokens of weight 0 still count where a loss divides by the number of
    tokens.
    """
    mask = action_mask.bool()
    if method == "none":
        return mask.to(log_probs.dtype)
    found = correction_range(
        log_probs, rollout_log_probs, mask, method=method, low=low, high=high, level=level
    )
    weights = torch.where(
        mask, found.ratio.clamp(max=found.high) if method == "tis" else found.kept(), 0.0
    )
    if veto is None:
        return weights
    vetoed = (mask & (log_probs.detach() - rollout_log_probs < math.log(veto))).any(
        -1, keepdim=True
    )  # (B, 1)
    return torch.where(vetoed, 0.0, weights)
