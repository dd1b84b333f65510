"""Filters of groups from which nothing can be learned."""

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor

from openppo.types import Sample


def useful_groups(
    samples: Sequence[Sample], compares_steps: bool, weights: Mapping[str, float]
) -> list[Sample]:
    """Scored samples of groups whose rewards differ; other groups teach nothing (arXiv 2503.14476)."""
    if not samples:
        return []

    rewards = [sample.total_reward(weights) for sample in samples]
    if compares_steps:
        # Unequal steps of single responses teach something even if their sums are equal.
        outcomes = []
        for sample, reward in zip(samples, rewards, strict=True):
            outcomes.append((reward, *_judged_steps(sample)))
        rewards = [outcomes.index(outcome) for outcome in outcomes]

    groups = [sample.group for sample in samples]
    teaches = ~one_reward_groups(torch.tensor(rewards), torch.tensor(groups))
    return list(compress(samples, teaches.tolist()))


def _judged_steps(sample: Sample) -> list[float]:
    """Rewards that are compared step by step: those of a single response, not of an agent's turns."""
    if sample.episode is not None:
        return []
    return [reward for segment in sample.segments for reward in segment.step_rewards]


def one_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for rows whose group has one reward, from which nothing can be learned.

    ``rewards`` (B,) and ``groups`` int64 (B,), in any order; bool (B,) (dynamic sampling, arXiv 2503.14476).
    """
    ids, index = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(ids))
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return (lowest == highest)[index]
