"""Filters of groups whose rewards teach nothing."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from openppo.rollout.rollout import by_episode, episode_reward
from openppo.types import Trajectory


def useful_groups(
    trajectories: Sequence[Trajectory], compares_steps: bool, weights: Mapping[str, float]
) -> list[Trajectory]:
    """Scored trajectories whose group has different rewards: the others teach nothing (arXiv 2503.14476)."""
    if not trajectories:
        return []
    episodes = by_episode(trajectories)
    rewards = [episode_reward(parts, weights) for parts in episodes]
    if (
        compares_steps
    ):  # unequal steps of single responses teach something even if their sums are equal
        earned = [
            (reward, *_judged_steps(parts[-1]))
            for reward, parts in zip(rewards, episodes, strict=True)
        ]
        rewards = [earned.index(each) for each in earned]
    same = one_reward_groups(
        torch.tensor(rewards), torch.tensor([parts[0].group for parts in episodes])
    )
    return [
        t for parts, drop in zip(episodes, same.tolist(), strict=True) if not drop for t in parts
    ]


def _judged_steps(trajectory: Trajectory) -> list[float]:
    """Rewards that are compared step by step: those of a single response, not of an agent's turns."""
    return trajectory.step_rewards if trajectory.episode is None else []


def one_reward_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """True for rows whose prompt got the same reward for all its responses, so that nothing is to be learned.

    ``rewards`` (B,) and ``groups`` int64 (B,), in any order; bool (B,) (dynamic sampling, arXiv 2503.14476).
    """
    ids, index = groups.unique(return_inverse=True)
    start = rewards.new_zeros(len(ids))
    low, high = (
        start.scatter_reduce(0, index, rewards, which, include_self=False)
        for which in ("amin", "amax")
    )
    return (low == high)[index]
