"""Two worlds of ranks in a launch: the first ones train, the last sample, each in a process group."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """Place of a rank in the launch: ``rank`` of ``size`` ranks; the last ``rollout_ranks`` of them only sample.

    Watchdog, files and messages use this rank, which is unique; the rank in a world is for its collectives.
    """

    rank: int
    size: int
    rollout_ranks: int
    timeout: timedelta
    store: dist.Store

    @property
    def samples(self) -> bool:
        """True if this rank only samples."""
        return self.rank >= self.size - self.rollout_ranks

    @property
    def world(self) -> tuple[int, int]:
        """Rank and size of this rank's world."""
        n_training = self.size - self.rollout_ranks
        if self.samples:
            return self.rank - n_training, self.rollout_ranks
        return self.rank, n_training

    def join(self, backend: str) -> None:
        """Join this rank's world as torch's default process group, with which every ZeRO stage works."""
        rank, size = self.world
        if self.rollout_ranks > 0:
            # Libraries read these variables; the launch's own values are no longer needed.
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        store = dist.PrefixStore("samplers" if self.samples else "trainers", self.store)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=self.timeout
        )

    def between(self) -> dist.ProcessGroupGloo:
        """Return a group of the first trainer and all samplers, in this order, beside the default ones."""
        rank = self.world[0] + 1 if self.samples else 0
        store = dist.PrefixStore("weights", self.store)
        return dist.ProcessGroupGloo(store, rank, 1 + self.rollout_ranks, self.timeout)

    def post(self, key: str, value: str) -> None:
        """Store ``value`` under ``key`` for all ranks."""
        self.store.set(f"openppo/{key}", value)

    def wait_for(self, key: str) -> str:
        """Return the value posted under ``key``, once it is there; ``DistStoreError`` after the run's time limit."""
        self.store.wait([f"openppo/{key}"], self.timeout)
        return bytes(self.store.get(f"openppo/{key}")).decode()
