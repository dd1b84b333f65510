"""Trajectories grouped by episode, and the rewards of episodes."""

from collections.abc import Iterable, Mapping, Sequence

from openppo.types import (
    Trajectory,
)


def episode_numbers(trajectories: Iterable[Trajectory]) -> list[int]:
    """The number of each trajectory's episode, counted from 0 in their order; one that is of none is alone."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [
        ("row", i) if t.episode is None else ("episode", id(t.episode))
        for i, t in enumerate(trajectories)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def by_episode(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The parts of each episode, both in order."""
    parts: dict[int, list[Trajectory]] = {}
    for number, trajectory in zip(episode_numbers(trajectories), trajectories, strict=True):
        parts.setdefault(number, []).append(trajectory)
    return list(parts.values())


def episode_reward(parts: Sequence[Trajectory], weights: Mapping[str, float]) -> float:
    """All that an episode earned: its score, which each of its ``parts`` has, and the rewards of all their tokens."""
    return parts[-1].total_score(weights) + sum(sum(part.token_rewards or []) for part in parts)


def whole_rewards(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> list[float]:
    """Reward of the whole episode that each trajectory is a part of."""
    numbers = episode_numbers(trajectories)
    rewards = [episode_reward(parts, weights) for parts in by_episode(trajectories)]
    return [rewards[number] for number in numbers]
