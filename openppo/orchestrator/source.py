"""Trajectories that were sampled while the policy trained: the asynchronous ``RolloutSource``."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.datasets import shard
from openppo.experience.hooks import Hooks
from openppo.experience.scoring import begin_scoring
from openppo.orchestrator.coordinator import Coordinator
from openppo.orchestrator.worker import Worker
from openppo.rewards import Scorer
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.rollout.tasks import TaskSampler
from openppo.strategy.trainable_model import TrainableModel
from openppo.strategy.weights import WeightSender
from openppo.tracking import Metrics
from openppo.tracking.phase import phase
from openppo.types import Comm, RolloutSource, Trajectory


@dataclass(frozen=True)
class Engines:
    """What evaluates, and what samples on this rank, inside ``with_weights``."""

    held_out: RolloutSource
    sampler: TaskSampler
    with_weights: Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class AsyncSource:
    """Batches that the ``coordinator``, on rank 0, cuts from what workers sample. Collective in every method.

    With ``sender`` workers are ranks of their own, which get the weights of ``actor`` every ``--sync_every`` steps;
    without, this rank is one of them: ``worker`` runs its engine until a batch is complete. ``scorer`` scores batches
    whose groups come without scores.
    """

    config: TrainPPOConfig
    actor: TrainableModel
    engines: Engines
    comm: Comm
    hooks: Hooks
    n_steps: int
    coordinator: Coordinator | None = None
    sender: WeightSender | None = None
    worker: Worker | None = None
    scorer: Scorer | None = None
    end_service: Callable[[], None] = lambda: None
    version: int = 0
    _synced: int | None = None  # None: workers have what the run started with
    _measured: Metrics | None = None  # of the last transfer

    @property
    def steps(self) -> int:
        """Global steps of the whole run."""
        return self.n_steps

    def __iter__(self) -> Iterator[list[Trajectory]]:
        while True:
            yield self._next()

    def publish(self, version: int) -> None:
        """Note the step, and give workers the new weights when they are due."""
        self.version = version
        due = self._synced is None or version - self._synced >= self.config.orchestrator.sync_every
        if due:
            self._synced = version
            if self.sender is not None:
                self._send(version)
            if self.config.orchestrator.reset_optimizer_on_sync:
                self.actor.reset_adam()
        if self.coordinator is not None:
            self.coordinator.advance(version, due)

    def evaluate(self) -> list[Trajectory]:
        """Scored responses to held-out tasks, sampled on the ranks that train."""
        return self.engines.held_out.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """What the buffer holds; rank 0 writes it."""
        return {} if self.coordinator is None else self.coordinator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; ``publish`` follows."""
        self._synced = None
        if self.coordinator is not None:
            self.coordinator.load_state_dict(state)

    def close(self) -> None:
        """End workers, and what evaluates."""
        if self.coordinator is not None:
            self.end_service()
            self.coordinator.close()
        self.engines.held_out.close()

    def _next(self) -> Rollout:
        """This rank's share of the next batch."""
        with self.hooks.timer.step(self.version + 1):
            with self.hooks.timer.phase("generation"):
                groups, metrics = self._batch()
            mine = [
                trajectory
                for group in shard(groups, self.comm.rank, self.comm.world_size)
                for trajectory in group
            ]
            self.hooks.timer.count_tokens("generation", sum(sum(t.action_mask) for t in mine))
            if self._measured is not None:
                metrics.merge(self._measured)
                self._measured = None
            own = metrics if self.comm.rank == 0 else Metrics()  # they are summed over ranks
            if self.scorer is None:
                rollout = Rollout(mine, own)
            else:
                with self.hooks.timer.phase("scoring"):
                    rollout = begin_scoring(self.scorer, mine, self.hooks.stop)
                rollout.metrics.merge(own)
            if self.coordinator is not None:
                rollout.failed.extend(self.coordinator.take_failed())
            return rollout

    def _batch(self) -> tuple[list[list[Trajectory]], Metrics]:
        """The groups of all ranks; ``Interrupted`` upon a signal and ``NothingTrainedError`` on all of them."""
        if self.coordinator is not None:
            self.coordinator.want_batch()
        if self.worker is not None:
            with self.engines.with_weights():
                self.worker.drive()
        batch, failure = None, None
        start = time.monotonic()
        if self.coordinator is not None:
            try:
                batch = self.coordinator.wait_for_batch(self.hooks.stop)
            except NothingTrainedError as error:
                failure = NothingTrainedError(str(error), self.coordinator.take_failed())
        batch, failure = self.comm.all_gather_object((batch, failure))[0]
        self.hooks.stop()
        if failure is not None:
            raise failure
        assert batch is not None, "no signal, and no batch"
        groups, metrics = batch
        if self.worker is None:
            metrics.add("async/wait_for_batch_s", time.monotonic() - start, reduce="max")
        return groups, metrics

    def _send(self, version: int) -> None:
        assert self.sender is not None
        if self.coordinator is not None:
            self.coordinator.pause_for(version)
        with phase("sync"):
            sent = self.sender.send(self.actor.merged())
        self._measured = Metrics()
        self._measured.add("async/sync_s", sent.seconds)
        self._measured.add("async/wait_for_samplers_s", sent.waited)
        self._measured.add("async/sync_gib", sent.n_bytes / 2**30)
