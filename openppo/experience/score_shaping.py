"""What is done to scores before they become rewards, and which samples are left out. Pure functions of (B,) tensors."""

import torch
from torch import Tensor

from openppo.config import RewardShapingConfig
from openppo.tracking.metrics import Moments
from openppo.types import Comm

_EPS = 1e-8


def soft_overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, factor: float = 1.0) -> Tensor:
    """0 up to max_len - buffer_len tokens, then a straight line down to -factor at max_len (arXiv 2503.14476, eq. 13).

    ``lengths`` (B,) are numbers of action tokens; float32 (B,), to be added to the scores.
    """
    over = (lengths - (max_len - buffer_len)) / buffer_len
    return -factor * over.clamp(0, 1).float()


def shape_scores(
    scores: Tensor, truncated: Tensor, lengths: Tensor, config: RewardShapingConfig, max_len: int
) -> Tensor:
    """Scores (B,) less the penalties for a missing end of sequence and for length, then clipped.

    ``truncated`` bool (B,): cut off by ``max_len``, the largest number of action tokens; ``lengths`` (B,) counts them.
    """
    if config.missing_eos_penalty is not None:
        scores = scores - config.missing_eos_penalty * truncated.to(scores.dtype)
    if config.overlong_buffer_len is not None:
        scores = scores + soft_overlong_penalty(
            lengths, max_len, config.overlong_buffer_len, config.overlong_penalty_factor
        )
    return scores.clamp(*config.reward_clip_range)


def overlong_mask(action_mask: Tensor, truncated: Tensor) -> Tensor:
    """``action_mask`` (B, L) without any action in rows that are ``truncated``, bool (B,) (arXiv 2503.14476)."""
    return action_mask.bool() & ~truncated.bool()[:, None]


def one_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for rows whose prompt got the same reward for all its responses, so that nothing is to be learned.

    ``rewards`` (B,) and ``groups`` int64 (B,), in any order; bool (B,) (dynamic sampling, arXiv 2503.14476).
    """
    ids, index = groups.unique(return_inverse=True)
    start = torch.zeros(len(ids), dtype=rewards.dtype, device=rewards.device)
    low = start.scatter_reduce(0, index, rewards, "amin", include_self=False)
    high = start.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return (low == high)[index]


class RunningMoments(Moments):
    """Moments of all scores of all ranks so far."""

    def update(self, scores: Tensor, comm: Comm) -> None:
        """Take in this rank's ``scores`` (B,); B may differ and be 0. Collective."""
        self.merge(Moments.of(scores, comm))

    def normalize(self, scores: Tensor, further_variance: float = 0.0) -> Tensor:
        """(score - mean) / sqrt(var + ``further_variance`` + 1e-8), same shape."""
        return (scores - self.mean) / (self.variance + further_variance + _EPS) ** 0.5

    def state_dict(self) -> dict[str, float]:
        """What ``load_state_dict`` takes."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the moments of an earlier run."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
