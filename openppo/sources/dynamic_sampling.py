"""Dynamic sampling: groups of one step from which something can be learned."""

from collections.abc import Sequence
from itertools import chain

import torch

from openppo import logger
from openppo.datasets import shard
from openppo.rollout.rollout import Rollout
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.types import Comm, Sample


class UsefulSamples:
    """Samples of useful groups, collected batch after batch until ``wanted`` groups are there. Collective."""

    def __init__(self, task: Task, wanted: int, comm: Comm) -> None:
        self.task = task
        self.wanted = wanted
        self.comm = comm
        self.metrics = Metrics()
        self.n_batches = 0
        self.n_groups = 0
        """Useful groups of all ranks."""
        self.all_samples: list[Sample] = []
        self._useful: list[Sample] = []
        self._failed: list[Sample] = []

    @property
    def are_enough(self) -> bool:
        """True if as many groups as wanted are there."""
        return self.n_groups >= self.wanted

    def add(self, batch: Rollout) -> int:
        """Add a scored batch; return how many of its groups, on all ranks, are useless."""
        useful = self.task.useful(batch)
        self.n_batches += 1
        self.all_samples += batch
        self._useful += useful
        self.metrics.merge(batch.metrics)
        self._failed += batch.failed

        n_useful = len({sample.group for sample in useful})
        n_groups = len({sample.group for sample in batch})
        counts = self.comm.all_reduce(torch.tensor([n_useful, n_groups - n_useful]))
        n_useful, n_useless = counts.tolist()
        self.n_groups += n_useful
        return n_useless

    def rollout(self, n_shown: int) -> Rollout:
        """Return this rank's share of the wanted groups, with at most ``n_shown`` failed episodes."""
        dealt = deal_groups(self._useful, self.wanted, self.comm)
        return Rollout(dealt, self.metrics, failed=self._failed[:n_shown])


def deal_groups(samples: Sequence[Sample], limit: int, comm: Comm) -> list[Sample]:
    """Return this rank's share of the first ``limit`` groups of all ranks, dealt like prompts. Collective."""
    gathered = list(chain.from_iterable(comm.all_gather_object(list(samples))))
    groups = sorted({sample.group for sample in gathered})[:limit]
    if not groups and comm.rank == 0:
        logger.warning("no prompt's responses got different rewards: nothing to train on")
    rank_groups = set(shard(groups, comm.rank, comm.world_size))
    dealt = [sample for sample in gathered if sample.group in rank_groups]
    return sorted(dealt, key=lambda sample: sample.group)
