"""Advantages and returns over action tokens. Tokens between two actions are crossed without discount."""

from __future__ import annotations

import torch
from torch import Tensor


def get_advantages_and_returns(
    values: Tensor,
    rewards: Tensor,
    action_mask: Tensor,
    gamma: float,
    lambd: float | Tensor,
    lambd_critic: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) from each action to the next.

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lambd A_next, R_t = A_t + V_t, where next is the
    next action of the row and V and A after the last action are 0. All (B, L), ``action_mask`` bool; returns
    advantages and returns, 0 where the mask is not set. What lies outside the mask is never read.

    ``lambd`` may be one number per row, (B,). With ``lambd_critic`` the returns are those of that lambda (decoupled
    GAE, arXiv 2503.01491); 1 gives Monte-Carlo returns.
    """
    mask = action_mask.bool()
    advantages = _generalized_advantages(values, rewards, mask, gamma, lambd)
    for_critic = advantages
    if lambd_critic is not None:
        for_critic = _generalized_advantages(values, rewards, mask, gamma, lambd_critic)
    return advantages, torch.where(mask, for_critic + values, 0.0)


def _generalized_advantages(
    values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lambd: float | Tensor
) -> Tensor:
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])  # (B,)
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(_action_columns(mask)):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lambd * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages


def length_adaptive_lambda(action_mask: Tensor, alpha: float) -> Tensor:
    """lambda = max(0, 1 - 1 / (alpha * length)) with the number of actions of each row as length (arXiv 2504.05118).

    ``action_mask`` bool (B, L); float32 (B,). Long responses get a lambda near 1: the sum of the weights lambda^k of
    all later steps is alpha * length.
    """
    lengths = action_mask.bool().sum(-1).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def get_cumulative_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward to go, R_t = r_t + gamma R_next, from each action to the next; (B, L), 0 outside the mask."""
    mask = action_mask.bool()
    returns = torch.zeros_like(rewards)
    next_return = torch.zeros_like(rewards[:, 0])  # (B,)
    for t in reversed(_action_columns(mask)):
        next_return = torch.where(mask[:, t], rewards[:, t] + gamma * next_return, next_return)
        returns[:, t] = torch.where(mask[:, t], next_return, 0.0)
    return returns


def _action_columns(mask: Tensor) -> list[int]:
    return mask.any(0).nonzero()[:, 0].tolist()
