"""One reward per token: a KL penalty on every action, the score on the last one."""

from __future__ import annotations

import torch
from torch import Tensor


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
