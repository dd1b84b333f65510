"""The losses of PPO, SFT, reward models and process reward models. Needs torch only.

Policy and value losses are means per sequence over its action tokens, then over sequences, unless
``reduction`` says otherwise; ``"none"`` returns the loss of each token, 0 outside the mask, for callers that
normalize over a whole optimizer step themselves.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openppo.models.log_probs import log_probs_from_logits
from openppo.models.masked import masked_mean

Reduction = Literal["sequence_mean", "token_mean", "none"]
IGNORE_INDEX = -100
_MAX_LOG_RATIO = 20.0


def reduce_loss(loss: Tensor, mask: Tensor | None, reduction: Reduction) -> Tensor:
    """Losses of single tokens (B, L) to a scalar, or with "none" to themselves, 0 outside the mask."""
    if reduction == "sequence_mean":
        return masked_mean(loss, mask, dim=-1).mean()
    if reduction == "token_mean":
        return masked_mean(loss, mask)
    if reduction == "none":
        return loss if mask is None else torch.where(mask.bool(), loss, 0.0)
    raise ValueError(f"reduction must be sequence_mean, token_mean or none, got {reduction!r}")


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """log_probs - old_log_probs clamped to +-20; 0 outside the mask. Shape (B, L)."""
    difference = (log_probs - old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return difference if action_mask is None else torch.where(action_mask.bool(), difference, 0.0)


def policy_ratio(log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
    """exp(log_probs - old_log_probs) with the difference clamped to +-20; 1 outside the mask. Shape (B, L)."""
    return log_ratio(log_probs, old_log_probs, action_mask).exp()


class PolicyLoss(nn.Module):
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7): -min(r A, clip(r, 1 - clip_eps, 1 + clip_eps_high) A).

    ``clip_eps_high`` defaults to ``clip_eps`` (arXiv 2503.14476: 0.28 beside 0.2). ``dual_clip`` c bounds the loss
    by -c A where A < 0 (arXiv 1912.09729, eq. 5).
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
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, action_mask: Tensor | None = None
    ) -> Tensor:
        """All (B, L) float; returns a scalar, or (B, L) with ``reduction="none"``."""
        ratio = self.ratio(log_probs, old_log_probs, action_mask)
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            loss = torch.where(advantages < 0, torch.min(loss, -self.dual_clip * advantages), loss)
        return reduce_loss(loss, action_mask, self.reduction)

    def ratio(self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """What is clipped: the ratio r of each token, (B, L), 1 outside the mask."""
        return policy_ratio(log_probs, old_log_probs, action_mask)

    def clipped(self, log_probs: Tensor, old_log_probs: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """Tokens whose ratio lies outside the clip range, bool (B, L)."""
        ratio = self.ratio(log_probs, old_log_probs, action_mask)
        return (ratio < 1 - self.clip_eps) | (ratio > 1 + self.clip_eps_high)


class ValueLoss(nn.Module):
    """0.5 max((clip(v, v_old +- clip_eps) - R)^2, (v - R)^2); without ``clip_eps`` 0.5 (v - R)^2.

    Value clipping as in the PPO reference implementation (openai/baselines, ppo2).
    """

    def __init__(self, clip_eps: float | None = None, reduction: Reduction = "sequence_mean") -> None:
        super().__init__()
        self.clip_eps = clip_eps
        self.reduction: Reduction = reduction

    def forward(self, values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor | None = None) -> Tensor:
        """All (B, L) float; returns a scalar, or (B, L) with ``reduction="none"``."""
        if action_mask is not None:  # before the square, whose gradient at NaN is NaN even where it does not count
            mask = action_mask.bool()
            values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values, returns))
        loss = (values - returns).square()
        if self.clip_eps is not None:
            clipped = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
            loss = torch.max((clipped - returns).square(), loss)
        return reduce_loss(0.5 * loss, action_mask, self.reduction)


class GPTLMLoss(nn.Module):
    """Next-token cross entropy: logits at t against the label at t + 1; labels of -100 do not count."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``logits`` (B, L, V), ``labels`` int64 (B, L); scalar mean over counted labels, 0 if there is none."""
        counted = labels[:, 1:] != IGNORE_INDEX
        log_probs = log_probs_from_logits(logits[:, :-1], labels[:, 1:].masked_fill(~counted, 0))  # float32, (B, L - 1)
        return -masked_mean(log_probs, counted)


class PairWiseLoss(nn.Module):
    """Bradley-Terry loss -log sigmoid(r_chosen - r_rejected - margin), averaged over pairs (arXiv 2203.02155)."""

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor, margin: Tensor | None = None) -> Tensor:
        """Rewards and optional ``margin`` of shape (B,); scalar."""
        difference = chosen_reward - reject_reward
        if margin is not None:
            difference = difference - margin
        return -F.logsigmoid(difference).mean()


class LogExpLoss(nn.Module):
    """log(1 + exp(r_rejected - r_chosen)), averaged over pairs (arXiv 2204.05862).

    Equals PairWiseLoss without margin.
    """

    def forward(self, chosen_reward: Tensor, reject_reward: Tensor) -> Tensor:
        """Rewards of shape (B,); scalar."""
        return F.softplus(reject_reward - chosen_reward).mean()


class PRMLoss(nn.Module):
    """Cross entropy of a process reward model at the placeholder tokens that end each step.

    ``labels`` are given at the placeholder positions. Integer labels are token ids; with ``reward_token_ids``
    only those tokens' logits compete. Float labels are the probability of the first of exactly two
    ``reward_token_ids`` (soft labels, arXiv 2312.08935). Labels of -100 do not count.
    """

    def __init__(self, placeholder_token_id: int, reward_token_ids: list[int] | None = None) -> None:
        super().__init__()
        self.placeholder_token_id = placeholder_token_id
        self.reward_token_ids = reward_token_ids

    def forward(
        self, inputs: Tensor, logits: Tensor, labels: Tensor, *, return_acc: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``inputs`` int64 (B, L), ``logits`` (B, L, V), ``labels`` int64 or float (B, L).

        Returns the scalar mean over placeholders, and with ``return_acc`` also the share of placeholders at
        which the likeliest (reward) token is the labelled one. Raises ``ValueError`` for labels that are no
        reward token, and for float labels without exactly two reward tokens.
        """
        chosen = (inputs == self.placeholder_token_id) & (labels != IGNORE_INDEX)
        step_logits, step_labels = logits[chosen], labels[chosen]  # (N, V), (N,)
        if self.reward_token_ids is not None:
            step_logits = step_logits[:, self.reward_token_ids]  # (N, number of reward tokens)
        targets = self._soft(step_labels) if labels.is_floating_point() else self._hard(step_labels)
        loss = F.cross_entropy(step_logits.float(), targets, reduction="sum") / max(len(step_labels), 1)
        if not return_acc:
            return loss
        wanted = targets.argmax(-1) if targets.dim() == 2 else targets
        correct = (step_logits.argmax(-1) == wanted).float()
        return loss, correct.sum() / max(len(step_labels), 1)

    def _soft(self, labels: Tensor) -> Tensor:
        if self.reward_token_ids is None or len(self.reward_token_ids) != 2:
            raise ValueError(f"float labels need exactly two reward_token_ids, got {self.reward_token_ids}")
        return torch.stack([labels, 1 - labels], dim=-1).float()  # (N, 2)

    def _hard(self, labels: Tensor) -> Tensor:
        if self.reward_token_ids is None:
            return labels
        tokens = torch.tensor(self.reward_token_ids, device=labels.device)
        matches = labels[:, None] == tokens  # (N, number of reward tokens)
        if not bool(matches.any(-1).all()):
            strange = sorted(set(labels[~matches.any(-1)].tolist()))
            raise ValueError(
                f"labels {strange} at placeholder positions are not among reward_token_ids {tokens.tolist()}"
            )
        return matches.int().argmax(-1)
