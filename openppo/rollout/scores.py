"""Scores in their trajectories."""

from collections.abc import Sequence

from openppo.types import (
    Score,
    Trajectory,
)


def write_scores(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
    """Add each score to its trajectory. Token rewards outside the action mask become 0; those of turns are added."""
    for trajectory, score in zip(trajectories, scores, strict=True):
        trajectory.scores.update(score.rewards)
        trajectory.extras.update(score.extras)
        trajectory.notes.update(score.notes)
        trajectory.reward_error = score.error if score.failed else None
        if score.token_rewards is not None:
            rewards = zip(score.token_rewards, trajectory.action_mask, strict=True)
            given = [reward if is_action else 0.0 for reward, is_action in rewards]
            if trajectory.token_rewards is None or trajectory.step_ends is None:
                trajectory.token_rewards, trajectory.step_ends = given, score.step_ends
                continue
            trajectory.token_rewards = list(
                map(sum, zip(given, trajectory.token_rewards, strict=True))
            )
            ends = trajectory.action_mask if score.step_ends is None else score.step_ends
            trajectory.step_ends = list(map(any, zip(ends, trajectory.step_ends, strict=True)))
