"""Advantages and returns over action tokens; tokens between two actions are skipped without discount."""

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
    """Estimate generalized advantages (arXiv 1506.02438, eq. 16) from each action to the next.

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lambd A_next, R_t = A_t + V_t, where next is the
    next action of the row and V and A after the last action are 0. All (B, L), ``action_mask`` bool; returns
    advantages and returns, 0 outside the mask. ``lambd`` may be one number per row, (B,). With ``lambd_critic`` the
    returns use that lambda (decoupled GAE, arXiv 2503.01491); 1 gives Monte-Carlo returns.

    >>> values, rewards = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 1.0]])
    >>> mask = torch.tensor([[True, True]])
    >>> get_advantages_and_returns(values, rewards, mask, gamma=1.0, lambd=0.5)
    (tensor([[0.2500, 0.5000]]), tensor([[0.7500, 1.0000]]))
    """
    mask = action_mask.bool()
    places = mask.cumsum(-1) - 1
    packed_values = pack_actions(values, mask, places)
    packed_rewards = pack_actions(rewards, mask, places)
    next_values = F.pad(packed_values[:, 1:], (0, 1))
    deltas = packed_rewards + gamma * next_values - packed_values

    sums = _discounted_sums(deltas, gamma * lambd)
    advantages = _unpack_actions(sums, mask, places)
    critic_advantages = advantages
    if lambd_critic is not None:
        critic_sums = _discounted_sums(deltas, gamma * lambd_critic)
        critic_advantages = _unpack_actions(critic_sums, mask, places)
    return advantages, torch.where(mask, critic_advantages + values, 0.0)


def length_adaptive_lambda(action_mask: Tensor, alpha: float) -> Tensor:
    """Lambda by length, max(0, 1 - 1 / (alpha * length)) (arXiv 2504.05118).

    The length of a row is its number of actions. ``action_mask`` bool (B, L); returns float32 (B,).

    >>> length_adaptive_lambda(torch.ones(1, 20, dtype=torch.bool), alpha=0.5)  # 1 - 1 / 10
    tensor([0.9000])
    """
    lengths = action_mask.bool().sum(-1).clamp(min=1)
    return (1 - 1 / (alpha * lengths)).clamp(min=0)


def get_cumulative_returns(rewards: Tensor, action_mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward to go, R_t = r_t + gamma R_next, from each action to the next.

    All (B, L), ``action_mask`` bool; 0 outside the mask.

    >>> rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])
    >>> get_cumulative_returns(rewards, mask, gamma=0.5)
    tensor([[0.5000, 0.0000, 1.0000]])
    """
    mask = action_mask.bool()
    places = mask.cumsum(-1) - 1
    sums = _discounted_sums(pack_actions(rewards, mask, places), gamma)
    return _unpack_actions(sums, mask, places)


def pack_actions(per_token: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Pack the entries under ``mask`` (B, L) to the left, with zeros after them."""
    n_rows, length = mask.shape
    packed = per_token.new_zeros(n_rows, length + 1)  # the last column takes all other entries
    columns = torch.where(mask, places, length)
    packed.scatter_(1, columns, per_token)
    return packed[:, :length]


def _unpack_actions(packed: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """Undo ``pack_actions``; 0 outside ``mask``."""
    per_token = packed.gather(1, places.clamp(min=0))
    return torch.where(mask, per_token, 0.0)


def _discounted_sums(terms: Tensor, discount: float | Tensor) -> Tensor:
    """Sum ``terms`` (B, L) with a discount, without a loop over tokens.

    S_t = x_t + c S_next, c one number or (B,). Sums are doubled: a sum of 2n terms is that of the first n, plus c^n
    times that of the next n.
    """
    factor = discount.reshape(-1, 1) if isinstance(discount, Tensor) else discount  # c^n
    n = 1
    while n < terms.shape[1]:
        next_terms = F.pad(terms[:, n:], (0, n))
        terms = terms + factor * next_terms
        n *= 2
        factor = factor * factor
    return terms
