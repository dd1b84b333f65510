"""Filters of groups from which nothing can be learned."""

from collections.abc import Mapping, Sequence
from itertools import chain, compress

import torch
from torch import Tensor

from openppo.rollout.episodes import by_episode, episode_reward
from openppo.types import Trajectory


def useful_groups(
    trajectories: Sequence[Trajectory], compares_steps: bool, weights: Mapping[str, float]
) -> list[Trajectory]:
    """Scored trajectories of groups whose rewards differ; other groups teach nothing (arXiv 2503.14476)."""
    if not trajectories:
        return []

    episodes = by_episode(trajectories)
    rewards = [episode_reward(segments, weights) for segments in episodes]
    if compares_steps:
        # Unequal steps of single responses teach something even if their sums are equal.
        outcomes = []
        for segments, reward in zip(episodes, rewards, strict=True):
            outcomes.append((reward, *_judged_steps(segments[-1])))
        rewards = [outcomes.index(outcome) for outcome in outcomes]

    groups = [segments[0].group for segments in episodes]
    teaches = ~one_reward_groups(torch.tensor(rewards), torch.tensor(groups))
    return list(chain.from_iterable(compress(episodes, teaches.tolist())))


def _judged_steps(trajectory: Trajectory) -> list[float]:
    """Rewards that are compared step by step: those of a single response, not of an agent's turns."""
    if trajectory.episode is not None:
        return []
    return trajectory.step_rewards


def one_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for rows whose group has one reward, from which nothing can be learned.

    ``rewards`` (B,) and ``groups`` int64 (B,), in any order; bool (B,) (dynamic sampling, arXiv 2503.14476).
    """
    ids, index = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(ids))
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    return (lowest == highest)[index]
