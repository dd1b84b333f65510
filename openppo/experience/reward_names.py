"""Names of rewards, compared with those of ``--reward_weights`` once samples are scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openppo import logger
from openppo.types import Comm, Ending, Trajectory

_BATCHES_WITH_TASKS = 10


@dataclass(eq=False)
class RewardNames:
    """Names of the rewards of a run's samples, ``seen`` on any rank; ``weights`` may name no others. Collective.

    They are compared once: after the first batch, or with several tasks, some of which come later, after ten.
    """

    weights: Mapping[str, float]
    comm: Comm
    seen: set[str] = field(default_factory=set)
    n_batches: int = 0
    is_settled: bool = False

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise ``ValueError`` on all ranks for a weight of a reward that no sample has; with tasks warn.

        A failed episode has no names, and one that a limit ended may lack some: a batch of such is not compared.
        Rewards of tokens have lost their names, so with such any weight may be meant.
        """
        if self.is_settled or not self.weights:
            return

        trained = [t for t in trajectories if t.episode is None or t.episode.ending.is_trained]
        n_complete = sum(t.episode is None or t.episode.ending is Ending.COMPLETED for t in trained)
        has_unnamed = any(t.token_rewards is not None for t in trained)
        has_tasks = any(t.prompt.task for t in trained)
        names = {name for t in trained for name in t.scores}

        everyones = self.comm.all_gather_object((n_complete, has_unnamed, has_tasks, names))
        counts, unnamed, tasks, names_of_ranks = zip(*everyones, strict=True)
        self.seen = self.seen.union(*names_of_ranks)
        if sum(counts) > 0:
            self._compare(any(unnamed), any(tasks))

    def _compare(self, has_unnamed: bool, has_tasks: bool) -> None:
        self.n_batches += 1
        unknown = sorted(self.weights.keys() - self.seen)
        if unknown and has_tasks and self.n_batches < _BATCHES_WITH_TASKS:
            return

        self.is_settled = True
        if not unknown or has_unnamed:
            return
        names = ", ".join(sorted(self.seen)) or "none"
        error = f"--reward_weights names {', '.join(unknown)}, but the rewards are {names}. Use their names."
        if not has_tasks:
            raise ValueError(error)
        if self.comm.rank == 0:
            logger.warning(error)
