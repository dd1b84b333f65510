"""Trajectories grouped by episode, and the rewards of episodes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from openppo.types import Trajectory


def episode_numbers(trajectories: Iterable[Trajectory]) -> list[int]:
    """Number the episodes from 0, in their order; return the number of each trajectory.

    A trajectory without an episode gets a number of its own.
    """
    numbers: dict[tuple[str, int], int] = {}
    by_trajectory: list[int] = []
    for i, trajectory in enumerate(trajectories):
        episode = trajectory.episode
        key = ("row", i) if episode is None else ("episode", id(episode))
        by_trajectory.append(numbers.setdefault(key, len(numbers)))
    return by_trajectory


def by_episode(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Return the segments of each episode, both in order."""
    segments: dict[int, list[Trajectory]] = defaultdict(list)
    for number, trajectory in zip(episode_numbers(trajectories), trajectories, strict=True):
        segments[number].append(trajectory)
    return list(segments.values())


def episode_reward(segments: Sequence[Trajectory], weights: Mapping[str, float]) -> float:
    """Return the total reward of an episode: its score plus the token rewards of its segments."""
    token_rewards = sum(sum(segment.token_rewards or []) for segment in segments)
    return segments[-1].total_score(weights) + token_rewards


def whole_rewards(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> list[float]:
    """Return for each trajectory the total reward of its episode."""
    rewards = [episode_reward(segments, weights) for segments in by_episode(trajectories)]
    return [rewards[number] for number in episode_numbers(trajectories)]
