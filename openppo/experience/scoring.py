"""Scoring of samples, in the background of other work."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from openppo.rewards import Scorer, start_scoring
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.rollout.scores import scored
from openppo.tracking import Metrics
from openppo.types import Comm, Sample, Score, StopCheck, segments_of


def begin_scoring(
    scorer: Scorer | None, samples: Sequence[Sample], stop: StopCheck, prefix: str = ""
) -> Rollout:
    """Start to score ``samples`` and their greedy responses; return a rollout of ``samples``.

    A sample is not scored if its episode failed or already has a reward of the whole. The metric ``reward_errors``
    counts samples on which the reward function raises; with ``prefix`` a count of 0 is left out.
    """
    greedy = {sample.group: sample.greedy for sample in samples if sample.greedy is not None}
    pending = [sample for sample in [*samples, *greedy.values()] if needs_score(sample)]

    wait_for: Callable[[], list[Score]] = list
    if scorer is not None:
        wait_for = start_scoring(scorer, pending, stop)
    metrics = Metrics()

    def take_scored() -> list[Sample]:
        scores = wait_for()
        n_failed = sum(score.failed for score in scores)
        if n_failed or not prefix:
            metrics.add(f"{prefix}reward_errors", n_failed, reduce="sum")

        remaining = iter(scores)

        def with_score(sample: Sample) -> Sample:
            is_scored = scorer is not None and needs_score(sample)
            return scored(sample, next(remaining)) if is_scored else sample

        scored_samples = [with_score(sample) for sample in samples]
        scored_greedy = {group: with_score(sample) for group, sample in greedy.items()}
        return [
            replace(sample, greedy=scored_greedy[sample.group]) if sample.greedy else sample
            for sample in scored_samples
        ]

    return Rollout(samples, metrics, take_scored)


def check_rewarded(samples: Sequence[Sample], comm: Comm) -> None:
    """Raise ``NothingTrainedError`` on all ranks if the reward function failed on every sample. Collective.

    ``--reward_error_value`` replaces the reward of single samples; with no other rewards there is nothing to train on.
    """
    errors = [sample.reward_error for sample in samples if sample.reward_error is not None]
    counts = comm.all_reduce(torch.tensor([len(samples), len(errors)]))
    n_samples, n_failed = counts.tolist()
    if n_failed == 0 or n_failed < n_samples:
        return

    first_errors = comm.all_gather_object(errors[:1])
    first = next(error for errors_of_rank in first_errors for error in errors_of_rank)
    raise NothingTrainedError(
        f"the reward function raised on all {n_samples} samples, --reward_error_value or not; the first: {first}"
    )


def check_rewards(samples: Sequence[Sample], comm: Comm, has_rewards: bool) -> None:
    """Raise on all ranks if no reward function worked, or if a run without rewards got some. Collective."""
    if has_rewards:
        check_rewarded(samples, comm)
    else:
        check_unrewarded(samples, comm)


def check_unrewarded(samples: Sequence[Sample], comm: Comm) -> None:
    """Raise ``ValueError`` on all ranks for a reward in a run of ``--reward_fn none``. Collective."""
    trained = [sample for sample in samples if sample.is_trained]
    names = {name for sample in trained for name in sample.scores}
    if any(segment.token_rewards is not None for segment in segments_of(trained)):
        names.add("token_rewards")

    all_names = sorted(set().union(*comm.all_gather_object(names)))
    if all_names:
        raise ValueError(
            f"--reward_fn none, but samples of the source have rewards ({', '.join(all_names)}): "
            "leave the flag out, or the rewards."
        )


def needs_score(sample: Sample) -> bool:
    """True if reward sources score it, unlike an episode that failed or already has a reward of the whole."""
    if sample.episode is None:
        return True
    return sample.is_trained and not sample.scores
