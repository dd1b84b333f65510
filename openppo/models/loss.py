"""Policy and value losses. Needs torch only.

``--policy_loss_type`` names an entry of ``POLICY_LOSSES``. All tensors are (B, L) float, masks bool. Also importable
from here: ``token_weights``, ``rollout_correction``, and the losses of SFT and reward models in ``supervised_loss.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from openppo import logger
from openppo.models.correction import RatioRange, rollout_correction  # noqa: F401
from openppo.models.log_probs import log_ratio, masked_mean, policy_ratio
from openppo.models.loss_weights import Reduction, reduce_loss, token_weights  # noqa: F401
from openppo.models.supervised_loss import GPTLMLoss, LogExpLoss, PairWiseLoss, PRMLoss  # noqa: F401

if TYPE_CHECKING:
    from openppo.config import LossAggregation, LossConfig


class PolicyLoss(nn.Module):
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_high) A).

    ``clip_eps_high`` defaults to ``clip_eps`` (arXiv 2503.14476: 0.28 with 0.2 below). ``dual_clip`` c bounds the loss
    by -c A where A < 0 (arXiv 1912.09729, eq. 5).

    >>> old_log_probs = torch.zeros(1, 2)
    >>> log_probs = torch.tensor([[1.5, 0.9]]).log()  # ratios 1.5 and 0.9: the first is clipped at 1.2
    >>> PolicyLoss(clip_eps=0.2)(log_probs, old_log_probs, advantages=torch.ones(1, 2))
    tensor(-1.0500)
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        clip_eps_high: float | None = None,
        dual_clip: float | None = None,
        reduction: Reduction = "sequence_mean",
    ) -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.clip_eps_high = clip_eps if clip_eps_high is None else clip_eps_high
        self.dual_clip = dual_clip
        self.reduction: Reduction = reduction

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
    ) -> Tensor:
        """Mean loss, a scalar, or (B, L) with ``reduction="none"``. All (B, L) float, ``rollout_log_probs`` unused."""
        loss = self.surrogate(self.ratio(log_probs, old_log_probs, action_mask), advantages)
        return reduce_loss(loss, action_mask, self.reduction)

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Loss (B, L) of each token."""
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            bounded = torch.min(loss, -self.dual_clip * advantages)
            loss = torch.where(advantages < 0, bounded, loss)
        return loss

    def ratio(
        self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Ratio r of each token before clipping, (B, L); 1 outside the mask."""
        return policy_ratio(log_probs, old_log_probs, action_mask)

    def clipped(
        self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens whose ratio lies outside the clip range, bool (B, L)."""
        ratio = self.ratio(log_probs, old_log_probs, action_mask)
        return (ratio < 1 - self.clip_eps) | (ratio > 1 + self.clip_eps_high)


class GSPOLoss(PolicyLoss):
    """Clipped surrogate of one ratio per sequence (arXiv 2507.18071, eq. 5): the geometric mean of its token ratios.

    Each token gets the sequence's ratio and the gradient of its own log-prob (GSPO-token, eq. 13), so advantages may
    differ from token to token. Where they are equal, the mean over a sequence has the gradient of eq. 5.

    >>> log_probs = torch.tensor([[4.0, 1.0]]).log()  # the sequence's ratio is the root of 4 * 1
    >>> GSPOLoss(clip_eps=0.2, clip_eps_high=0.2).ratio(log_probs, torch.zeros(1, 2))
    tensor([[2., 2.]])
    """

    def __init__(
        self, clip_eps: float = 3e-4, clip_eps_high: float | None = 4e-4, *others: Any, **named: Any
    ) -> None:
        super().__init__(clip_eps, clip_eps_high, *others, **named)

    def ratio(
        self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Ratio of each token's sequence before clipping, (B, L); 1 outside the mask."""
        log_ratios = log_ratio(log_probs.detach(), old_log_probs, action_mask)
        sequence_ratio = masked_mean(log_ratios, action_mask, dim=-1).exp()[:, None]  # (B, 1)

        # 1 everywhere, with the gradient of each token's log-prob
        unit_ratio = policy_ratio(log_probs, log_probs.detach(), action_mask)
        ratio = sequence_ratio * unit_ratio
        return ratio if action_mask is None else torch.where(action_mask.bool(), ratio, 1.0)


class MaskingLoss(PolicyLoss):
    """A policy loss weighted by a ratio to the engine's log-probs, without tokens whose ratio is out of range."""

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
    ) -> Tensor:
        """Mean loss, a scalar, or (B, L) with ``reduction="none"``. All (B, L) float.

        ``ValueError`` without ``rollout_log_probs``.
        """
        if rollout_log_probs is None:
            raise ValueError(
                f"{type(self).__name__} compares with the engine's log-probs: pass rollout_log_probs."
            )

        masking = self.masking(log_probs, old_log_probs, rollout_log_probs, action_mask=action_mask)
        loss = self.unweighted(log_probs, old_log_probs, advantages, action_mask=action_mask)
        return reduce_loss(masking.kept() * loss, action_mask, self.reduction)

    def masking(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        action_mask: Tensor | None = None,
    ) -> RatioRange:
        """Ratio to the engine's log-probs, and the range outside of which tokens have no loss."""
        raise NotImplementedError

    def unweighted(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None,
    ) -> Tensor:
        """Loss (B, L) of each token before its ratio weights it."""
        raise NotImplementedError


class DoubleSidedLoss(MaskingLoss):
    """Double-sided masking: -f(r) A for r = p / p_rollout (GLM-5, arXiv 2602.15763).

    f(r) = r in [1 - clip_eps, 1 + clip_eps_high], else 0. Outside this range the gradient is 0 for both signs of A.
    Only ``clipped`` reads old log-probs: pass it the engine's log-probs.

    >>> log_probs = torch.tensor([[1.1, 1.5]]).log()  # beside the engine's: the second is out of range
    >>> loss = DoubleSidedLoss(reduction="none")
    >>> loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), rollout_log_probs=torch.zeros(1, 2))
    tensor([[-1.1000, -0.0000]])
    """

    def __init__(
        self,
        clip_eps: float = 0.2,
        clip_eps_high: float = 0.28,
        reduction: Reduction = "sequence_mean",
    ) -> None:
        super().__init__(clip_eps, clip_eps_high, reduction=reduction)

    def masking(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        action_mask: Tensor | None = None,
    ) -> RatioRange:
        """Ratio of the policy to the engine, with its gradient, and the clip range."""
        ratio = policy_ratio(log_probs, rollout_log_probs, action_mask)
        return RatioRange(ratio, 1 - self.clip_eps, 1 + self.clip_eps_high)

    def unweighted(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None,
    ) -> Tensor:
        """-A, (B, L)."""
        return -advantages


class DecoupledLoss(MaskingLoss):
    """PPO's clipped surrogate times k = p_old / p_rollout without gradient, 0 above ``cap`` (arXiv 2505.24298).

    The old policy is that before the update, with recomputed log-probs; the engine may have sampled with older weights.

    >>> old_log_probs = torch.tensor([[2.0, 6.0]]).log()  # over the engine's: 6 exceeds the cap of 5
    >>> loss = DecoupledLoss(reduction="none")
    >>> loss(old_log_probs, old_log_probs, torch.ones(1, 2), rollout_log_probs=torch.zeros(1, 2))
    tensor([[-2., -0.]])
    """

    cap = 5.0
    """Highest k, as in AReaL."""

    def masking(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rollout_log_probs: Tensor,
        action_mask: Tensor | None = None,
    ) -> RatioRange:
        """Ratio of the old policy to the engine, without gradient, and the range up to ``cap``."""
        ratio = policy_ratio(old_log_probs, rollout_log_probs, action_mask).detach()
        return RatioRange(ratio, 0.0, self.cap)

    def unweighted(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None,
    ) -> Tensor:
        """PPO's clipped surrogate, (B, L)."""
        return self.surrogate(self.ratio(log_probs, old_log_probs, action_mask), advantages)


class CISPOLoss(nn.Module):
    """-stop_gradient(min(r, eps_max)) A log p: no token loses its gradient (arXiv 2506.13585, eq. 4; 2510.13786).

    >>> log_probs = torch.tensor([[0.5]]).log().requires_grad_()
    >>> CISPOLoss()(log_probs, torch.tensor([[0.25]]).log(), torch.ones(1, 1)).backward()
    >>> log_probs.grad  # -ratio * advantage
    tensor([[-2.]])
    """

    def __init__(self, eps_max: float = 5.0, reduction: Reduction = "sequence_mean") -> None:
        super().__init__()
        self.eps_max = eps_max
        self.reduction: Reduction = reduction

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
    ) -> Tensor:
        """Mean loss, a scalar, or (B, L) with ``reduction="none"``. All (B, L) float, ``rollout_log_probs`` unused."""
        ratio = policy_ratio(log_probs.detach(), old_log_probs, action_mask)
        truncated = ratio.clamp(max=self.eps_max)
        if action_mask is not None:
            log_probs = torch.where(action_mask.bool(), log_probs, 0.0)
        return reduce_loss(-truncated * advantages * log_probs, action_mask, self.reduction)

    def clipped(
        self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens whose ratio is truncated, bool (B, L)."""
        return policy_ratio(log_probs, old_log_probs, action_mask) > self.eps_max


class ValueLoss(nn.Module):
    """0.5 max((clip(v, v_old +- clip_eps) - R)^2, (v - R)^2); without ``clip_eps`` 0.5 (v - R)^2.

    Value clipping as in the PPO reference implementation (openai/baselines, ppo2).

    >>> values, old_values, returns = torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[3.0]])
    >>> ValueLoss()(values, old_values, returns)
    tensor(2.)
    >>> ValueLoss(clip_eps=0.5)(values, old_values, returns)  # as if the value had moved to 0.5
    tensor(3.1250)
    """

    def __init__(
        self, clip_eps: float | None = None, reduction: Reduction = "sequence_mean"
    ) -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.reduction: Reduction = reduction

    def forward(
        self, values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Mean loss, a scalar, or (B, L) with ``reduction="none"``. All (B, L) float."""
        # Mask before the square: its gradient at NaN is NaN even where the loss is masked.
        if action_mask is not None:
            mask = action_mask.bool()
            values = torch.where(mask, values, 0.0)
            old_values = torch.where(mask, old_values, 0.0)
            returns = torch.where(mask, returns, 0.0)

        loss = (values - returns).square()
        if self.clip_eps is not None:
            clipped = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
            loss = torch.max((clipped - returns).square(), loss)
        return reduce_loss(0.5 * loss, action_mask, self.reduction)

    def clipped(
        self, values: Tensor, old_values: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """Tokens whose value moved further than the clip range, bool (B, L)."""
        clip_eps = torch.inf if self.clip_eps is None else self.clip_eps
        clipped = (values - old_values).abs() > clip_eps
        return clipped if action_mask is None else clipped & action_mask.bool()


class PolicyLossEntry(NamedTuple):
    """Builder of a policy loss, and the default aggregation of its token losses."""

    make: Callable[[LossConfig], Any]
    """Builds a module with the ``forward`` and the ``clipped`` of ``PolicyLoss``."""
    loss_agg: LossAggregation | None = None
    """Aggregation used unless an option sets one; None means the estimator's default."""


def _ppo(config: LossConfig) -> PolicyLoss:
    return PolicyLoss(config.eps_clip, config.eps_clip_high, config.dual_clip, reduction="none")


def _gspo(config: LossConfig) -> GSPOLoss:
    if config.eps_clip > 0.02:
        logger.warning(
            "--policy_loss_type gspo with --eps_clip %g clips next to nothing: use 3e-4, and --eps_clip_high 4e-4",
            config.eps_clip,
        )
    return GSPOLoss(config.eps_clip, config.eps_clip_high, config.dual_clip, reduction="none")


def _cispo(config: LossConfig) -> CISPOLoss:
    return CISPOLoss(config.eps_clip_high or 5.0, reduction="none")


def _double_sided(config: LossConfig) -> DoubleSidedLoss:
    return DoubleSidedLoss(config.eps_clip, config.eps_clip_high or 0.28, reduction="none")


def _decoupled(config: LossConfig) -> DecoupledLoss:
    return DecoupledLoss(config.eps_clip, config.eps_clip_high, config.dual_clip, reduction="none")


POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "ppo": PolicyLossEntry(_ppo),
    "gspo": PolicyLossEntry(_gspo, loss_agg="sequence_mean"),
    "cispo": PolicyLossEntry(_cispo),
    "double_sided": PolicyLossEntry(_double_sided),
    "decoupled": PolicyLossEntry(_decoupled),
}
"""Policy losses by the names of ``--policy_loss_type``.

>>> sorted(POLICY_LOSSES)
['cispo', 'decoupled', 'double_sided', 'gspo', 'ppo']
"""


def policy_loss(config: LossConfig) -> Any:
    """Build the loss that ``--policy_loss_type`` names, with the ``forward`` and the ``clipped`` of ``PolicyLoss``.

    >>> from openppo.config import LossConfig
    >>> policy_loss(LossConfig(policy_loss_type="cispo"))
    CISPOLoss()
    """
    return POLICY_LOSSES[config.loss_type].make(config)
