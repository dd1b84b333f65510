"""Names of rewards, compared with the names in options once samples are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openppo import logger
from openppo.types import Comm, Ending, Sample, segments_of

_BATCHES_WITH_TASKS = 10
"""Batches before an unknown name is reported in a run with tasks."""


@dataclass(eq=False)
class RewardNames:
    """Names of the rewards of a run's samples; ``weights`` and ``pass_on`` may name no others.

    Names ``seen`` on any rank are compared once, on all ranks together: after the first batch, or after ten in a run
    with tasks, since some tasks come later.
    """

    weights: Mapping[str, float]
    comm: Comm
    pass_on: str | None = None
    seen: set[str] = field(default_factory=set)
    n_batches: int = 0
    is_settled: bool = False

    def check(self, samples: Sequence[Sample]) -> None:
        """Raise ``ValueError`` on all ranks for the name of a reward that no sample has. Collective.

        With tasks a warning replaces the error. A failed episode has no names, and one that a limit ended may lack
        some, so a batch of only such episodes is not compared. Token rewards have no names, so any weight may be meant
        for them.
        """
        if self.is_settled or not (self.weights or self.pass_on):
            return

        trained = [sample for sample in samples if sample.is_trained]
        endings = [None if sample.episode is None else sample.episode.ending for sample in trained]
        n_complete = sum(ending in (None, Ending.COMPLETED) for ending in endings)
        has_unnamed = any(segment.token_rewards is not None for segment in segments_of(trained))
        has_tasks = any(sample.prompt.task for sample in trained)
        names = {name for sample in trained for name in sample.scores}

        gathered = self.comm.all_gather_object((n_complete, has_unnamed, has_tasks, names))
        counts, unnamed, tasks, names_of_ranks = zip(*gathered, strict=True)
        self.seen = self.seen.union(*names_of_ranks)
        if sum(counts) > 0:
            self._compare(any(unnamed), any(tasks))

    def _compare(self, has_unnamed: bool, has_tasks: bool) -> None:
        """Compare the names in options with the names of rewards so far."""
        self.n_batches += 1
        named = {"--reward_weights": set() if has_unnamed else set(self.weights)}
        named["--pass_on"] = set() if self.pass_on is None else {self.pass_on}
        unknown = {flag: sorted(names - self.seen) for flag, names in named.items()}
        if any(unknown.values()) and has_tasks and self.n_batches < _BATCHES_WITH_TASKS:
            return

        self.is_settled = True
        known = ", ".join(sorted(self.seen)) or "none"
        for flag, names in unknown.items():
            if names:
                self._report(
                    f"{flag} names {', '.join(names)}, but the rewards are {known}. Use their names.",
                    has_tasks,
                )

    def _report(self, error: str, has_tasks: bool) -> None:
        """Raise ``ValueError``; with tasks warn on rank 0."""
        if not has_tasks:
            raise ValueError(error)
        if self.comm.rank == 0:
            logger.warning(error)
