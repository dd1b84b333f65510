"""One reward per token: a KL penalty on every action, the score on the last one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.models.masked import KLEstimator, compute_approx_kl
from openppo.types import Trajectory

_LARGEST_K3 = 10.0


@dataclass(frozen=True)
class StepRewards:
    """Rewards of steps or tokens, 0 outside ``ends``; both (B, L)."""

    rewards: Tensor
    ends: Tensor

    def added_to(self, scores: Tensor) -> Tensor:
        """Whole rewards (B,): ``scores`` (B,) and those of all steps."""
        return (scores.double() + self.rewards.double().sum(-1)).to(scores.dtype)


def collect_step_rewards(trajectories: Sequence[Trajectory], device: torch.device) -> StepRewards | None:
    """Collate rewards of steps or tokens; None without any."""
    if all(t.token_rewards is None for t in trajectories):
        return None
    rewards = torch.zeros(len(trajectories), max(len(t.token_ids) for t in trajectories))
    ends = torch.zeros(rewards.shape, dtype=torch.bool)
    for row, t in enumerate(trajectories):
        if t.token_rewards is not None:
            rewards[row, : len(t.token_rewards)] = torch.tensor(t.token_rewards)
            rewarded = torch.tensor(t.action_mask if t.step_ends is None else t.step_ends)
            ends[row, : len(t.action_mask)] = rewarded & torch.tensor(t.action_mask)
    return StepRewards(torch.where(ends, rewards, 0.0).to(device), ends.to(device))


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, action_mask: Tensor, kl_estimator: KLEstimator) -> Tensor:
    """KL penalty (B, L); k3 at most 10, like verl's ``low_var_kl``.

    Without a bound a single token at a log-prob of -14, where the reference has -0.1, is a million nats.
    """
    kl = compute_approx_kl(log_probs, ref_log_probs, action_mask, kl_estimator)
    return kl.clamp(max=_LARGEST_K3) if kl_estimator == "k3" else kl


def compute_reward(
    scores: Tensor,
    kl: Tensor | None,
    action_mask: Tensor,
    kl_coef: float,
    reward_clip_range: tuple[float, float] | None = None,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """r_t = -kl_coef kl_t + token_reward_t + [t is the last action] clip(score) (arXiv 1909.08593, 2009.01325).

    ``scores`` (B,), ``kl`` (B, L) per-token estimates or None without a reference, ``action_mask`` bool (B, L),
    ``token_rewards`` (B, L) of single tokens, which are not clipped. Returns float32 (B, L), 0 where the mask is
    not set; a row without any action has no reward.
    """
    mask = action_mask.bool()
    if reward_clip_range is not None:
        scores = scores.clamp(*reward_clip_range)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(-1, keepdim=True)  # (B, 1), -1 without any action
    rewards = torch.where(places == last, scores[:, None].float(), 0.0)
    if kl is not None:
        rewards = rewards - kl_coef * kl
    if token_rewards is not None:
        rewards = rewards + token_rewards
    return torch.where(mask, rewards, 0.0).float()
