"""Scores for trajectories, and the groups from whose scores something is to be learned."""

from collections.abc import Mapping, Sequence

import torch

from openppo.experience.estimators import Estimator
from openppo.experience.token_rewards import one_reward_groups
from openppo.rewards import Scorer, start_scoring
from openppo.rollout.rollout import Rollout, by_episode, check_weights, episode_reward, write_scores
from openppo.tracking import Metrics
from openppo.types import StopCheck, Trajectory


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    weights: Mapping[str, float],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """A rollout of ``trajectories`` on which scoring has begun, and on the greedy responses beside them.

    An episode is scored once, by its last trajectory, unless it failed or has a reward of the whole already. The metric
    ``reward_errors``, with ``prefix`` only if there are any, counts those on which the reward function raises. Reading
    raises ``ValueError`` if ``weights`` names no reward.
    """
    greedy = list({id(t.greedy): t.greedy for t in trajectories if t.greedy is not None}.values())
    metrics, parts = Metrics(), [of_one for of_one in by_episode([*trajectories, *greedy]) if needs_score(of_one[-1])]
    scored = [of_episode[-1] for of_episode in parts]
    wait_for = start_scoring(scorer, scored, stop) if scorer is not None else list

    def write() -> None:
        scores = wait_for()
        for score, of_episode in zip(scores, parts, strict=scorer is not None):
            write_scores(of_episode[-1:], [score])
            for other in of_episode[:-1]:
                other.scores.update(score.rewards)
        check_weights(scored, weights)
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def needs_score(trajectory: Trajectory) -> bool:
    """Whether sources of rewards score it: not an episode that failed or has a reward of the whole already."""
    return trajectory.episode is None or (trajectory.episode.ending.is_trained and not trajectory.scores)


def useful_groups(
    trajectories: Sequence[Trajectory], estimator: Estimator, weights: Mapping[str, float]
) -> list[Trajectory]:
    """Scored trajectories whose group has different rewards: the others teach nothing (arXiv 2503.14476)."""
    if not trajectories:
        return []
    episodes = by_episode(trajectories)
    rewards = [episode_reward(parts, weights) for parts in episodes]
    if estimator.compares_steps:  # unequal steps teach something even if their sums are equal
        steps = [[reward for part in parts for reward in part.step_rewards] for parts in episodes]
        earned = [(parts[-1].total_score(weights), *steps[i]) for i, parts in enumerate(episodes)]
        rewards = [earned.index(each) for each in earned]
    same = one_reward_groups(torch.tensor(rewards), torch.tensor([parts[0].group for parts in episodes]))
    return [t for parts, drop in zip(episodes, same.tolist(), strict=True) if not drop for t in parts]
