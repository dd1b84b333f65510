"""Policy losses by the names of ``--policy_loss_type``, and how token losses add up over an optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openppo.config import LossAggregation, LossConfig
from openppo.models.loss import PolicyLoss, Reduction, log_ratio, policy_ratio, reduce_loss
from openppo.models.masked import masked_mean

logger = logging.getLogger("openppo")

_WIDE_FOR_GSPO = 0.02


class GSPOLoss(PolicyLoss):
    """Clipped surrogate of one ratio per sequence (arXiv 2507.18071, eq. 5): the geometric mean of its token ratios.

    Each token gets the sequence's ratio and the gradient of its own log-prob (GSPO-token, eq. 13), so advantages
    may differ from token to token. Where they are equal, the mean over a sequence has the gradient of eq. 5.
    The ratio is near 1, hence the narrow clip range.
    """

    def __init__(
        self,
        clip_eps: float = 3e-4,
        clip_eps_high: float | None = 4e-4,
        dual_clip: float | None = None,
        reduction: Reduction = "sequence_mean",
    ) -> None:
        super().__init__(clip_eps, clip_eps_high, dual_clip, reduction)

    def ratio(self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """What is clipped: the ratio of each token's sequence, (B, L), 1 outside the mask."""
        log_ratios = log_ratio(log_probs.detach(), old_log_probs, action_mask)
        sequence_ratio = masked_mean(log_ratios, action_mask, dim=-1).exp()[:, None]  # (B, 1)
        gradient_only = policy_ratio(log_probs, log_probs.detach(), action_mask)  # 1
        spread = sequence_ratio * gradient_only
        return spread if action_mask is None else torch.where(action_mask.bool(), spread, 1.0)


class CISPOLoss(nn.Module):
    """-stop_gradient(min(r, eps_max)) A log p: no token loses its gradient (arXiv 2506.13585, eq. 4; 2510.13786)."""

    def __init__(self, eps_max: float = 5.0, reduction: Reduction = "sequence_mean") -> None:
        super().__init__()
        self.eps_max = eps_max
        self.reduction: Reduction = reduction

    def forward(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """All (B, L) float; returns a scalar, or (B, L) with ``reduction="none"``."""
        weight = self.ratio(log_probs.detach(), old_log_probs, action_mask).clamp(max=self.eps_max)
        if action_mask is not None:
            log_probs = torch.where(action_mask.bool(), log_probs, 0.0)
        return reduce_loss(-weight * advantages * log_probs, action_mask, self.reduction)

    def ratio(self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """What is truncated: the ratio r of each token, (B, L), 1 outside the mask."""
        return policy_ratio(log_probs, old_log_probs, action_mask)

    def clipped(self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """Tokens whose weight is truncated, bool (B, L)."""
        return self.ratio(log_probs, old_log_probs, action_mask) > self.eps_max


@dataclass(frozen=True)
class PolicyLossEntry:
    """One entry of ``POLICY_LOSSES``.

    ``make`` builds from options a loss that is called with log-probs, old log-probs, advantages and action mask, all
    (B, L), and returns the loss of each token; its ``clipped`` says which tokens reached a bound. ``loss_agg`` is
    how it adds up unless an option says otherwise (None: as the advantage estimator wants).
    """

    make: Callable[[LossConfig], PolicyLoss | CISPOLoss]
    loss_agg: LossAggregation | None = None


def _gspo(config: LossConfig) -> GSPOLoss:
    if config.eps_clip > _WIDE_FOR_GSPO:
        logger.warning(
            "--policy_loss_type gspo with --eps_clip %g clips next to nothing, since a response's mean log-ratio is "
            "small: the paper has --eps_clip 3e-4 --eps_clip_high 4e-4",
            config.eps_clip,
        )
    return GSPOLoss(config.eps_clip, config.eps_clip_high, config.dual_clip, reduction="none")


POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "ppo": PolicyLossEntry(lambda c: PolicyLoss(c.eps_clip, c.eps_clip_high, c.dual_clip, reduction="none")),
    "gspo": PolicyLossEntry(_gspo, loss_agg="sequence_mean"),
    "cispo": PolicyLossEntry(lambda c: CISPOLoss(c.cispo_eps_max, reduction="none")),
}
"""By the names of ``--policy_loss_type``."""


def policy_loss(config: LossConfig) -> PolicyLoss | CISPOLoss:
    """The loss that ``--policy_loss_type`` names."""
    return POLICY_LOSSES[config.policy_loss_type].make(config)


def token_weights(
    action_mask: Tensor, loss_agg: LossAggregation, n_tokens: int, n_sequences: int, max_len: int
) -> Tensor:
    """Float32 (B, L) weights, 0 outside ``action_mask``, with which token losses add up over an optimizer step.

    ``n_tokens`` and ``n_sequences`` count the action tokens, and the rows that have any, of all micro-batches and
    ranks of the step. Summed over them, (loss * weights).sum() is for "token_mean" the mean over tokens, for
    "sequence_mean" the mean over sequences of each one's mean over tokens, and for "constant" the sum over
    n_sequences * ``max_len`` (arXiv 2503.20783).
    """
    mask = action_mask.bool()
    if loss_agg == "token_mean":
        return mask / float(max(n_tokens, 1))
    if loss_agg == "sequence_mean":
        return mask / (mask.sum(-1, keepdim=True).clamp(min=1) * float(max(n_sequences, 1)))
    if loss_agg == "constant":
        return mask / float(max(n_sequences, 1) * max_len)
    raise ValueError(f"loss_agg must be token_mean, sequence_mean or constant, got {loss_agg!r}")
