"""The asynchronous ``RolloutSource``: its samples are made while the policy trains."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.datasets import shard
from openppo.experience.hooks import Hooks
from openppo.experience.scoring import begin_scoring
from openppo.orchestrator.coordinator import Coordinator
from openppo.orchestrator.work_buffer import Group
from openppo.orchestrator.worker import Worker
from openppo.rewards import Scorer
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.rollout.tasks import TaskSampler
from openppo.strategy.trainable_model import TrainableModel
from openppo.strategy.weights import WeightSender
from openppo.tracking import Metrics
from openppo.tracking.phase import phase
from openppo.types import Comm, RolloutSource, Sample


@dataclass(frozen=True)
class Engines:
    """Source of held-out responses, and sampler of this rank, for use inside ``with_weights``."""

    held_out: RolloutSource
    sampler: TaskSampler
    with_weights: Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class AsyncSource:
    """Source of the batches that the ``coordinator``, on rank 0, cuts. Every method is collective.

    With ``sender`` workers are other ranks, which get the weights of ``actor`` every ``--sync_every`` steps. Without
    it, this rank is one of them: ``worker`` runs its engine until a batch is complete. ``scorer`` scores batches whose
    groups come without scores.
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
    _synced: int | None = None
    """Version that workers have; None: the weights at the start of the run."""
    _transfer: Metrics | None = None
    """Metrics of the last transfer of weights."""

    @property
    def steps(self) -> int:
        """Global steps of the whole run."""
        return self.n_steps

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            yield self._next()

    def publish(self, version: int) -> None:
        """Note the step, and send the new weights to workers when they are due."""
        options = self.config.orchestrator
        self.version = version
        is_due = self._synced is None or version - self._synced >= options.sync_every
        if is_due:
            self._synced = version
            if self.sender is not None:
                self._send(version)
            if options.reset_optimizer_on_sync:
                self.actor.reset_adam()
        if self.coordinator is not None:
            self.coordinator.advance(version, is_due)

    def evaluate(self) -> Sequence[Sample]:
        """Return scored samples of held-out prompts, sampled on the ranks that train."""
        return self.engines.held_out.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Return the coordinator's state; rank 0 writes it."""
        return {} if self.coordinator is None else self.coordinator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; ``publish`` follows."""
        self._synced = None
        if self.coordinator is not None:
            self.coordinator.load_state_dict(state)

    def close(self) -> None:
        """End workers and the source of held-out responses."""
        if self.coordinator is not None:
            self.end_service()
            self.coordinator.close()
        self.engines.held_out.close()

    def _next(self) -> Rollout:
        """Return this rank's share of the next batch."""
        timer = self.hooks.timer
        with timer.step(self.version + 1):
            with timer.phase("generation"):
                groups, metrics = self._batch()
            rank_groups = shard(groups, self.comm.rank, self.comm.world_size)
            samples = [sample for group in rank_groups for sample in group]
            n_sampled = sum(sample.n_actions for sample in samples)
            timer.count_tokens("generation", n_sampled)
            if self._transfer is not None:
                metrics.merge(self._transfer)
                self._transfer = None

            rank_metrics = metrics if self.comm.rank == 0 else Metrics()  # ranks are summed
            if self.scorer is None:
                rollout = Rollout(samples, rank_metrics)
            else:
                with timer.phase("scoring"):
                    rollout = begin_scoring(self.scorer, samples, self.hooks.stop)
                rollout.metrics.merge(rank_metrics)
            if self.coordinator is not None:
                rollout.failed.extend(self.coordinator.take_failed())
            return rollout

    def _batch(self) -> tuple[list[Group], Metrics]:
        """Return the groups of all ranks; all raise ``Interrupted`` upon a signal, or ``NothingTrainedError``."""
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
        self._transfer = Metrics()
        self._transfer.add("async/sync_s", sent.seconds)
        self._transfer.add("async/wait_for_samplers_s", sent.waited)
        self._transfer.add("async/sync_gib", sent.n_bytes / 2**30)
