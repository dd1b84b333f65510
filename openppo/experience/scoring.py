"""Scoring of trajectories beside other work."""

from collections.abc import Sequence

import torch

from openppo.rewards import Scorer, start_scoring
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout, by_episode, write_scores
from openppo.tracking import Metrics
from openppo.types import Comm, StopCheck, Trajectory


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """A rollout of ``trajectories`` on which scoring has begun, and on the greedy responses beside them.

    An episode is scored once, by its last trajectory, unless it failed or has a reward of the whole already. The metric
    ``reward_errors``, with ``prefix`` only if there are any, counts those on which the reward function raises.
    """
    greedy = list({id(part): part for t in trajectories for part in t.greedy}.values())
    metrics, parts = (
        Metrics(),
        [of_one for of_one in by_episode([*trajectories, *greedy]) if needs_score(of_one[-1])],
    )
    scored = [of_episode[-1] for of_episode in parts]
    wait_for = start_scoring(scorer, scored, stop) if scorer is not None else list

    def write() -> None:
        scores = wait_for()
        for score, of_episode in zip(scores, parts, strict=scorer is not None):
            write_scores(of_episode[-1:], [score])
            for other in of_episode[:-1]:
                other.scores.update(score.rewards)
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def check_rewarded(trajectories: Sequence[Trajectory], comm: Comm) -> None:
    """``NothingTrainedError`` on all ranks if a reward function failed on every sample of all of them. Collective.

    ``--reward_error_value`` stands in for single samples; a function that works on none says nothing about any.
    """
    errors = [parts[-1].reward_error for parts in by_episode(trajectories)]
    failed = [error for error in errors if error is not None]
    n_samples, n_failed = comm.all_reduce(torch.tensor([len(errors), len(failed)])).tolist()
    if n_failed == 0 or n_failed < n_samples:
        return

    first = next(error for of_rank in comm.all_gather_object(failed[:1]) for error in of_rank)
    raise NothingTrainedError(
        f"the reward function raised on all {n_samples} samples, --reward_error_value or not; the first: {first}"
    )


def needs_score(trajectory: Trajectory) -> bool:
    """Whether sources of rewards score it: not an episode that failed or has a reward of the whole already."""
    return trajectory.episode is None or (
        trajectory.episode.ending.is_trained and not trajectory.scores
    )
