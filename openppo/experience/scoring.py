"""Scoring of trajectories, in the background of other work."""

from collections.abc import Callable, Sequence

import torch

from openppo.rewards import Scorer, start_scoring
from openppo.rollout.episodes import by_episode
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.rollout.scores import write_scores
from openppo.tracking import Metrics
from openppo.types import Comm, Score, StopCheck, Trajectory


def begin_scoring(
    scorer: Scorer | None,
    trajectories: list[Trajectory],
    stop: StopCheck,
    prefix: str = "",
) -> Rollout:
    """Start to score ``trajectories`` and their greedy responses; return a rollout of ``trajectories``.

    An episode is scored once, by its last trajectory, unless it failed or already has a reward of the whole. The metric
    ``reward_errors`` counts samples on which the reward function raises; with ``prefix`` a count of 0 is left out.
    """
    greedy = {id(segment): segment for t in trajectories for segment in t.greedy}
    episodes = by_episode([*trajectories, *greedy.values()])
    pending = [segments for segments in episodes if needs_score(segments[-1])]

    wait_for: Callable[[], list[Score]] = list
    if scorer is not None:
        wait_for = start_scoring(scorer, [segments[-1] for segments in pending], stop)
    metrics = Metrics()

    def write() -> None:
        scores = wait_for()
        if scorer is not None:
            for segments, score in zip(pending, scores, strict=True):
                _write_score(segments, score)

        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

    return Rollout(trajectories, metrics, write)


def _write_score(segments: Sequence[Trajectory], score: Score) -> None:
    """Write an episode's score into its last trajectory, and the named rewards into all of them."""
    *earlier, last = segments
    write_scores([last], [score])
    for segment in earlier:
        segment.scores.update(score.rewards)


def check_rewarded(trajectories: Sequence[Trajectory], comm: Comm) -> None:
    """Raise ``NothingTrainedError`` on all ranks if the reward function failed on every sample. Collective.

    ``--reward_error_value`` replaces the reward of single samples; with no other rewards there is nothing to train on.
    """
    episodes = by_episode(trajectories)
    last_segments = [segments[-1] for segments in episodes]
    errors = [segment.reward_error for segment in last_segments if segment.reward_error is not None]
    counts = comm.all_reduce(torch.tensor([len(episodes), len(errors)]))
    n_samples, n_failed = counts.tolist()
    if n_failed == 0 or n_failed < n_samples:
        return

    first_errors = comm.all_gather_object(errors[:1])
    first = next(error for errors_of_rank in first_errors for error in errors_of_rank)
    raise NothingTrainedError(
        f"the reward function raised on all {n_samples} samples, --reward_error_value or not; the first: {first}"
    )


def check_rewards(trajectories: Sequence[Trajectory], comm: Comm, has_rewards: bool) -> None:
    """Raise on all ranks if no reward function worked, or if a run without rewards got some. Collective."""
    if has_rewards:
        check_rewarded(trajectories, comm)
    else:
        check_unrewarded(trajectories, comm)


def check_unrewarded(trajectories: Sequence[Trajectory], comm: Comm) -> None:
    """Raise ``ValueError`` on all ranks for a reward in a run of ``--reward_fn none``. Collective."""
    trained = [t for t in trajectories if t.episode is None or t.episode.ending.is_trained]
    names = {name for t in trained for name in t.scores}
    if any(t.token_rewards is not None for t in trained):
        names.add("token_rewards")

    all_names = sorted(set().union(*comm.all_gather_object(names)))
    if all_names:
        raise ValueError(
            f"--reward_fn none, but samples of the source have rewards ({', '.join(all_names)}): "
            "leave the flag out, or the rewards."
        )


def needs_score(trajectory: Trajectory) -> bool:
    """True if reward sources score it, unlike an episode that failed or already has a reward of the whole."""
    if trajectory.episode is None:
        return True
    return trajectory.episode.ending.is_trained and not trajectory.scores
