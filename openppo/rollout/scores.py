"""Scores in their trajectories."""

from collections.abc import Sequence

from openppo.types import Score, Trajectory


def write_scores(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
    """Add each score to its trajectory.

    Token rewards outside the action mask become 0; those of a turn's own rewards are added.
    """
    for trajectory, score in zip(trajectories, scores, strict=True):
        trajectory.scores.update(score.rewards)
        trajectory.extras.update(score.extras)
        trajectory.notes.update(score.notes)
        trajectory.reward_error = score.error if score.failed else None
        if score.token_rewards is None:
            continue

        pairs = zip(score.token_rewards, trajectory.action_mask, strict=True)
        token_rewards = [reward if is_action else 0.0 for reward, is_action in pairs]
        if trajectory.token_rewards is None or trajectory.step_ends is None:
            trajectory.token_rewards = token_rewards
            trajectory.step_ends = score.step_ends
            continue

        both_rewards = zip(token_rewards, trajectory.token_rewards, strict=True)
        trajectory.token_rewards = list(map(sum, both_rewards))
        step_ends = trajectory.action_mask if score.step_ends is None else score.step_ends
        both_ends = zip(step_ends, trajectory.step_ends, strict=True)
        trajectory.step_ends = list(map(any, both_ends))
