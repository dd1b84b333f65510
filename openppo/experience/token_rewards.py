"""One reward per token: shaped scores on the last action and rewards of steps, less a KL penalty."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.config import RewardShapingConfig
from openppo.models.argument_order import check_tensor
from openppo.types import Sample, segments_of


@dataclass(frozen=True)
class StepRewards:
    """Rewards of steps or tokens, 0 outside the mask ``ends``; both (B, L)."""

    rewards: Tensor
    ends: Tensor

    def added_to(self, scores: Tensor) -> Tensor:
        """Add the rewards of all steps to ``scores`` (B,)."""
        whole_rewards = scores.double() + self.rewards.double().sum(-1)
        return whole_rewards.to(scores.dtype)

    def taken_from(self, whole_rewards: Tensor) -> Tensor:
        """Subtract the rewards of all steps from ``whole_rewards`` (B,)."""
        scores = whole_rewards.double() - self.rewards.double().sum(-1)
        return scores.to(whole_rewards.dtype)


def collect_step_rewards(samples: Sequence[Sample], device: torch.device) -> StepRewards:
    """Collate rewards of steps or tokens, the segments of a sample side by side; both (N, segments * L)."""
    most = max(len(sample.segments) for sample in samples)
    width = max(len(segment.token_ids) for segment in segments_of(samples))
    rewards = torch.zeros(len(samples), most, width)
    ends = torch.zeros(rewards.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        for place, segment in enumerate(sample.segments):
            if segment.token_rewards is None:
                continue
            n_tokens = len(segment.token_ids)
            rewards[row, place, :n_tokens] = torch.tensor(segment.token_rewards)
            step_ends = segment.action_mask if segment.step_ends is None else segment.step_ends
            segment_ends = torch.tensor(step_ends) & torch.tensor(segment.action_mask)
            ends[row, place, :n_tokens] = segment_ends

    rewards = torch.where(ends, rewards, 0.0)
    return StepRewards(rewards.flatten(1).to(device), ends.flatten(1).to(device))


def compute_reward(
    scores: Tensor,
    kl: Tensor | None,
    action_mask: Tensor,
    kl_coef: float,
    reward_clip_range: tuple[float, float] | None = None,
    token_rewards: Tensor | None = None,
) -> Tensor:
    """Reward of each token (arXiv 1909.08593, 2009.01325).

    r_t = -kl_coef kl_t + token_reward_t + [t is the last action] clip(score)

    ``scores`` (B,), ``kl`` (B, L) k1 of each token or None without a reference, ``action_mask`` bool (B, L);
    ``token_rewards`` (B, L) are not clipped. Returns float32 (B, L), 0 outside the mask.

    >>> kl, action_mask = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[False, True, True]])
    >>> compute_reward(torch.tensor([5.0]), kl, action_mask, kl_coef=0.5)
    tensor([[ 0.0000, -0.5000,  4.0000]])
    """
    order = "compute_reward(scores, kl, action_mask, kl_coef, reward_clip_range)"
    check_tensor(scores, "scores", n_dims=1, order=order)
    if kl is not None:
        check_tensor(kl, "kl", n_dims=2, order=order)
    check_tensor(action_mask, "action_mask", n_dims=2, order=order)
    if isinstance(kl_coef, Tensor) and kl_coef.ndim > 0:
        raise TypeError(
            f"kl_coef has the shape {tuple(kl_coef.shape)}, and is one number: OpenPPO's order is {order}."
        )

    if reward_clip_range is not None:
        scores = scores.clamp(*reward_clip_range)
    mask = action_mask.bool()
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(-1, keepdim=True)  # (B, 1), -1 without any action

    rewards = torch.where(places == last, scores[:, None].float(), 0.0)
    if kl is not None:
        rewards = rewards - kl_coef * kl
    if token_rewards is not None:
        rewards = rewards + token_rewards
    return torch.where(mask, rewards, 0.0).float()


def soft_overlong_penalty(
    lengths: Tensor, max_len: int, buffer_len: int, factor: float = 1.0
) -> Tensor:
    """Penalty by length (arXiv 2503.14476, eq. 13), to be added to scores.

    0 up to max_len - buffer_len tokens, then a straight line down to -factor at max_len. ``lengths`` (B,) count
    action tokens; returns float32 (B,).
    """
    over = (lengths - (max_len - buffer_len)) / buffer_len
    return -factor * over.clamp(0, 1).float()


def shape_scores(
    scores: Tensor, truncated: Tensor, lengths: Tensor, config: RewardShapingConfig, max_len: int
) -> Tensor:
    """Subtract penalties for a missing end of sequence and for length from scores (B,), then clip.

    ``truncated`` bool (B,) marks rows cut off by ``max_len``, the largest number of action tokens; ``lengths`` (B,)
    count these tokens.
    """
    if config.missing_eos_penalty is not None:
        scores = scores - config.missing_eos_penalty * truncated.to(scores.dtype)

    buffer_len = config.overlong_buffer_len
    if buffer_len is not None:
        factor = config.overlong_penalty_factor
        scores = scores + soft_overlong_penalty(lengths, max_len, buffer_len, factor=factor)

    return scores.clamp(*config.reward_clip_range)


def overlong_mask(action_mask: Tensor, truncated: Tensor) -> Tensor:
    """Remove all actions of rows that are ``truncated``, bool (B,), from ``action_mask`` (B, L) (arXiv 2503.14476)."""
    return action_mask.bool() & ~truncated.bool()[:, None]
