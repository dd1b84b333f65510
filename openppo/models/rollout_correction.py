"""Correction of the loss for probabilities that differ between rollout engine and training actor.

The engine samples from pi_rollout, the losses take their ratios against pi_old, which the training actor computes
for the same weights. k = pi_old / pi_rollout of a token is the weight that makes the loss unbiased.
"""

import torch
from torch import Tensor

from openppo.config import RolloutCorrection
from openppo.models.loss import policy_ratio

DEFAULT_RANGES: dict[str, tuple[float, float]] = {"tis": (0.0, 2.0), "mis": (0.5, 2.0), "icepop": (0.5, 5.0)}
"""Lower and upper threshold of each method."""


def rollout_correction(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    action_mask: Tensor,
    method: RolloutCorrection,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Weights of token losses for k = exp(log_probs - rollout_log_probs), (B, L), without gradient; 0 outside the mask.

    "tis" min(k, high), truncated importance sampling (https://fengyao.notion.site/off-policy-rl); "mis" k inside
    [low, high] and 0 outside, masked importance sampling of single tokens
    (https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda); "icepop" the same with
    a wider upper default (https://ringtech.notion.site/icepop); "none" 1. Tokens of weight 0 still count where a
    loss divides by the number of tokens. ``DEFAULT_RANGES`` has the thresholds where ``low`` and ``high`` are None.
    """
    mask = action_mask.bool()
    if method == "none":
        return mask.to(log_probs.dtype)
    if method not in DEFAULT_RANGES:
        raise ValueError(f"method must be none, {', '.join(DEFAULT_RANGES)}, got {method!r}")
    default_low, default_high = DEFAULT_RANGES[method]
    low, high = default_low if low is None else low, default_high if high is None else high
    k = policy_ratio(log_probs, rollout_log_probs, mask).detach()
    weights = k.clamp(max=high) if method == "tis" else torch.where((k >= low) & (k <= high), k, 0.0)
    return torch.where(mask, weights, 0.0)
