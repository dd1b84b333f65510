"""Advantages and returns over action tokens. Tokens between two actions are crossed without discount."""

import torch
from torch import Tensor
from torch.nn import functional as F


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
    advantages and returns, 0 outside the mask. ``lambd`` may be one number per row, (B,). With ``lambd_critic`` the
    returns are those of that lambda (decoupled GAE, arXiv 2503.01491); 1 gives Monte-Carlo returns.
    """
    mask = action_mask.bool()
    places = mask.cumsum(-1) - 1
    packed = pack_actions(values, mask, places)
    deltas = pack_actions(rewards, mask, places) + gamma * F.pad(packed[:, 1:], (0, 1)) - packed
    advantages = for_critic = _unpack_actions(_discounted_sums(deltas, gamma * lambd), mask, places)
    if lambd_critic is not None:
        for_critic = _unpack_actions(_discounted_sums(deltas, gamma * lambd_critic), mask, places)
    return advantages, torch.where(mask, for_critic + values, 0.0)


def length_adaptive_lambda(action_mask: Tensor, alpha: float) -> Tensor:
    """lambda = max(0, 1 - 1 / (alpha * length)) with the number of actions of each row as length (arXiv 2504.05118).

    ``action_mask`` bool (B, L); float32 (B,).
    """
    lengths = action_mask.bool().sum(-1).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def get_cumulative_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward to go, R_t = r_t + gamma R_next, from each action to the next; (B, L), 0 outside the mask."""
    mask = action_mask.bool()
    places = mask.cumsum(-1) - 1
    return _unpack_actions(
        _discounted_sums(pack_actions(rewards, mask, places), gamma), mask, places
    )


def pack_actions(per_token: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Pack the entries under ``mask`` (B, L) to the left, zeros behind."""
    n_rows, length = mask.shape
    moved = per_token.new_zeros(n_rows, length + 1)  # the last column takes what no action has
    return moved.scatter_(1, torch.where(mask, places, length), per_token)[:, :length]


def _unpack_actions(of_actions: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    return torch.where(mask, of_actions.gather(1, places.clamp(min=0)), 0.0)


def _discounted_sums(terms: Tensor, discount: float | Tensor) -> Tensor:
    """S_t = x_t + c S_next of (B, L), c one number or (B,), in a few operations: no loop over tokens.

    By doubling: the sum of 2n terms is that of n, and c^n times that of the next n.
    """
    factor = discount.reshape(-1, 1) if isinstance(discount, Tensor) else discount  # c^n
    n = 1
    while n < terms.shape[1]:
        terms = terms + factor * F.pad(terms[:, n:], (0, n))
        n, factor = 2 * n, factor * factor
    return terms
