"""Weights that correct for the difference between the sampling and the trained policy. Needs torch only."""

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
"""Thresholds of every method for geometric means, which lie near 1."""


class RatioRange(NamedTuple):
    """Ratio (B, L) of each token, and the range [low, high] outside of which tokens are left out."""

    ratio: Tensor
    low: float
    high: float

    def kept(self) -> Tensor:
        """The ratio (B, L), 0 where a token is left out."""
        in_range = (self.ratio >= self.low) & (self.ratio <= self.high)
        return torch.where(in_range, self.ratio, 0.0)

    def capped(self) -> Tensor:
        """The ratio (B, L), at most ``high``."""
        return self.ratio.clamp(max=self.high)


def correction_range(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    method: RolloutCorrection,
    low: float | None = None,
    high: float | None = None,
    level: CorrectionLevel = "token",
) -> RatioRange:
    """Ratio k = exp(log_probs - rollout_log_probs), without gradient, and the range of ``method``.

    ``level`` "token": k of each token; "sequence": its product over a row's action tokens; "geometric": its geometric
    mean over them. 1 outside the mask; log k is clamped to +-20. ``low`` and ``high`` default to ``DEFAULT_RANGES`` and
    ``GEOMETRIC_RANGE``. ``ValueError`` for unknown names.
    """
    if method not in DEFAULT_RANGES:
        raise ValueError(f"method must be none, {', '.join(DEFAULT_RANGES)}, got {method!r}")

    default_low, default_high = DEFAULT_RANGES[method]
    mask = action_mask.bool()
    log_k = log_ratio(log_probs, rollout_log_probs, mask).detach()  # (B, L)
    if level == "sequence":
        row_sums = masked_sum(log_k, mask, -1)[:, None].clamp(-20.0, 20.0)  # (B, 1)
        log_k = row_sums.expand_as(log_k)
    elif level == "geometric":
        row_means = masked_mean(log_k, mask, -1)[:, None]  # (B, 1)
        log_k = row_means.expand_as(log_k)
        default_low, default_high = GEOMETRIC_RANGE
    elif level != "token":
        raise ValueError(f"level must be token, sequence or geometric, got {level!r}")

    k = torch.where(mask, log_k, 0.0).exp()
    if low is None:
        low = default_low
    if high is None:
        high = default_high
    return RatioRange(k, low, high)


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
    """Weights of token losses, (B, L), from the k of ``correction_range``; 0 outside the mask, without gradient.

    The engine samples from pi_rollout, but ratios compare with pi_old of the training actor; weights
    k = pi_old / pi_rollout make the loss unbiased:

    - "tis": min(k, high), truncated importance sampling (https://fengyao.notion.site/off-policy-rl);
    - "mis": k inside [low, high] and 0 outside, masked importance sampling
      (https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda);
    - "icepop": the same with a wider upper default (https://ringtech.notion.site/icepop);
    - "none": 1.

    A row with any token whose own k lies below ``veto`` has weight 0. Tokens of weight 0 still count where a loss
    divides by the number of tokens.
    """
    mask = action_mask.bool()
    if method == "none":
        return mask.to(log_probs.dtype)

    correction = correction_range(
        log_probs,
        rollout_log_probs,
        mask,
        method=method,
        low=low,
        high=high,
        level=level,
    )
    weights = correction.capped() if method == "tis" else correction.kept()
    weights = torch.where(mask, weights, 0.0)
    if veto is None:
        return weights

    token_log_k = log_probs.detach() - rollout_log_probs  # (B, L)
    is_below = mask & (token_log_k < math.log(veto))
    vetoed = is_below.any(-1, keepdim=True)  # (B, 1)
    return torch.where(vetoed, 0.0, weights)
