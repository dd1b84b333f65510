"""The asynchronous ``RolloutSource``: its samples are made while the policy trains."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.datasets import shard
from openppo.experience.hooks import Hooks
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.rewards import Scorer
from openppo.rollout.failures import N_SHOWN, NothingTrainedError
from openppo.rollout.rollout import Rollout, wait_for_scores
from openppo.sources.coordinator import ALL_EQUAL, Coordinator
from openppo.sources.dynamic_sampling import UsefulSamples
from openppo.sources.held_out import HeldOut
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.task import Task, TaskControl, serve_nothing
from openppo.sources.work_buffer import Group
from openppo.sources.worker import Worker
from openppo.strategy.weights import WeightSender
from openppo.tracking import Metrics
from openppo.tracking.phase import phase
from openppo.types import Sample


@dataclass(eq=False)
class AsyncSource:
    """Source of the batches that the ``coordinator``, on rank 0, cuts.

    Every method is collective, but for those of ``TaskControl``, which any thread of rank 0 may call. With ``sender``
    workers are other ranks, which get the weights of the actor every ``--sync_every`` steps. Without it, this rank is
    one of them: ``worker`` runs its engine until a batch is complete. ``scorer`` scores batches whose groups come
    without scores. ``newcomer`` makes a task of the fields that a program registers; ``serve`` lets programs do so.
    """

    config: TrainPPOConfig
    sampler: RankSampler
    held_out: HeldOut
    hooks: Hooks
    n_steps: int
    newcomer: Callable[[Mapping[str, Any]], Task]
    coordinator: Coordinator | None = None
    sender: WeightSender | None = None
    worker: Worker | None = None
    scorer: Scorer | None = None
    serve: Callable[[TaskControl], Callable[[], None]] = serve_nothing
    version: int = 0
    _synced: int | None = None
    """Version that workers have; None: the weights at the start of the run."""
    _transfer: Metrics | None = None
    """Metrics of the last transfer of weights."""
    _end_service: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.coordinator is not None:
            self._end_service = self.serve(self)

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
                self.sampler.actor.reset_adam()
        if self.coordinator is not None:
            self.coordinator.advance(version, is_due)

    def evaluate(self) -> Sequence[Sample]:
        """Return scored samples of held-out prompts, sampled on the ranks that train."""
        return self.held_out.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Return the coordinator's state; rank 0 writes it."""
        return {} if self.coordinator is None else self.coordinator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; ``publish`` follows."""
        self._synced = None
        if self.coordinator is None:
            return
        for fields in state["joined"]:
            if fields["name"] not in self.coordinator.tasks:
                self.coordinator.join(self.newcomer(fields))
        self.coordinator.load_state_dict(state)

    def close(self) -> None:
        """End workers and the source of held-out responses."""
        if self._end_service is not None:
            self._end_service()
        if self.coordinator is not None:
            self.coordinator.close()
        self.sampler.close()

    def progress(self) -> dict[str, dict[str, float]]:
        """Return each task's progress, as ``TaskControl.progress`` does."""
        assert self.coordinator is not None, "tasks are watched on rank 0"
        return self.coordinator.progress()

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Change a task, as ``TaskControl.change`` does."""
        assert self.coordinator is not None, "tasks are changed on rank 0"
        self.coordinator.change(name, ratio, max_concurrent)

    def register(self, fields: Mapping[str, Any]) -> None:
        """Add a task while the run lasts, as ``TaskControl.register`` does."""
        assert self.coordinator is not None, "tasks register on rank 0"
        task = self.newcomer(fields)
        task.check_prompts()
        self.coordinator.join(task)

    def _next(self) -> Rollout:
        """Return this rank's share of the next batch."""
        with self.hooks.timer.step(self.version + 1):
            drops_here = self.scorer is not None and self.config.ppo.dynamic_sampling
            n_groups = self.config.prompts_per_step
            rollout = self._useful(n_groups) if drops_here else self._rollout(n_groups)
            if self.coordinator is not None:
                rollout.failed.extend(self.coordinator.take_failed())
            return rollout

    def _rollout(self, n_groups: int) -> Rollout:
        """Return this rank's share of the next ``n_groups``; start to score them if trainers do."""
        timer = self.hooks.timer
        comm = self.sampler.comm
        with timer.phase("generation"):
            groups, metrics = self._batch(n_groups)
        rank_groups = shard(groups, comm.rank, comm.world_size)
        samples = [sample for group in rank_groups for sample in group]
        n_sampled = sum(sample.n_actions for sample in samples)
        timer.count_tokens("generation", n_sampled)
        if self._transfer is not None:
            metrics.merge(self._transfer)
            self._transfer = None

        rank_metrics = metrics if comm.rank == 0 else Metrics()  # ranks are summed
        if self.scorer is None:
            return Rollout(samples, rank_metrics)
        with timer.phase("scoring"):
            rollout = begin_scoring(self.scorer, samples, self.hooks.stop)
        rollout.metrics.merge(rank_metrics)
        return rollout

    def _useful(self, n_groups: int) -> Rollout:
        """Return this rank's share of ``n_groups`` that teach something, by the scores of trainers.

        Others take the place of those that teach nothing. ``NothingTrainedError`` after too many in a row.
        """
        (task,) = self.held_out.tasks  # reward models score a single task
        comm = self.sampler.comm
        useful = UsefulSamples(task, n_groups, comm)
        n_in_vain = 0
        while not useful.are_enough:
            n_useful_before = useful.n_groups
            rollout = self._rollout(n_groups - useful.n_groups)
            with self.hooks.timer.phase("scoring"):
                wait_for_scores(rollout, self.hooks.stop)
            n_useless = useful.add(rollout)
            if self.coordinator is not None:
                self.coordinator.give_back(n_useless)

            n_in_vain = n_useless + (n_in_vain if useful.n_groups == n_useful_before else 0)
            if n_in_vain >= task.most_in_vain:
                check_rewarded(useful.all_samples, comm)
                raise NothingTrainedError(ALL_EQUAL.format(n_in_vain))
        return useful.rollout(N_SHOWN)

    def _batch(self, n_groups: int) -> tuple[list[Group], Metrics]:
        """Return ``n_groups`` of all ranks; all raise ``Interrupted`` upon a signal, or ``NothingTrainedError``."""
        if self.coordinator is not None:
            self.coordinator.want_batch(n_groups)
        if self.worker is not None:
            with self.sampler.with_weights():
                self.worker.drive()

        batch, failure = None, None
        start = time.monotonic()
        if self.coordinator is not None:
            try:
                batch = self.coordinator.wait_for_batch(self.hooks.stop)
            except NothingTrainedError as error:
                failure = NothingTrainedError(str(error), self.coordinator.take_failed())

        batch, failure = self.sampler.comm.all_gather_object((batch, failure))[0]
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
            sent = self.sender.send(self.sampler.actor.merged())
        self._transfer = Metrics()
        self._transfer.add("async/sync_s", sent.seconds)
        self._transfer.add("async/wait_for_samplers_s", sent.waited)
        self._transfer.add("async/sync_gib", sent.n_bytes / 2**30)
