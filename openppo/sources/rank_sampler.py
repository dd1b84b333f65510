"""Sampling on one rank: its engine with the actor's weights, and its player of groups."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from openppo.rollout.driver import Leave
from openppo.rollout.engine import Engine
from openppo.rollout.memory import free_memory
from openppo.sources.groups import GroupInput, GroupPlayer, PlayedGroup, play_together
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.types import Comm


@dataclass(frozen=True)
class RankSampler:
    """Engine and player of a rank that trains. All ranks call every method together.

    ``version`` returns the global steps of ``actor``. With ``fits_once`` the engine fits its rows into the memory that
    was free when it first decoded: another number of rows would change the last bits of log-probs. ``leave`` is the
    fate of other requests when a batch is complete.
    """

    engine: Engine
    actor: TrainableModel
    player: GroupPlayer
    comm: Comm
    device: torch.device
    version: Callable[[], int]
    fits_once: bool = False
    leave: Leave = "abandon"

    @contextmanager
    def with_weights(self) -> Iterator[None]:
        """Let the engine decode with the actor's current weights inside the ``with`` block."""
        self.engine.use_version(self.version())
        with ExitStack() as stack:
            with timed("sync"):
                stack.enter_context(self.engine.with_weights(self.actor))
            if self.fits_once and self.engine.free is None:
                self.engine.fit_into(_least_free_memory(self.comm, self.device))
            yield

    def play(self, groups: Sequence[GroupInput], metrics: Metrics) -> list[PlayedGroup]:
        """Play this rank's groups, inside ``with_weights``."""
        return play_together(self.player, groups, self.comm, metrics=metrics, leave=self.leave)

    def close(self) -> None:
        """End players and driver."""
        self.player.close()


def _least_free_memory(comm: Comm, device: torch.device) -> int | None:
    """Return the smallest number of free bytes of any rank; None without GPUs."""
    free_by_rank = comm.all_gather_object(free_memory(device))
    return min((free for free in free_by_rank if free is not None), default=None)
