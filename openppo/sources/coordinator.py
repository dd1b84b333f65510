"""The coordinator of workers and batches, on the trainers' first rank."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import DistNetworkError

from openppo import logger
from openppo.rollout.failures import N_SHOWN, NothingTrainedError
from openppo.rollout.kept import as_json, from_json, is_kept_whole
from openppo.sources.outcomes import Outcome
from openppo.sources.schedule import Start, TaskSchedule
from openppo.sources.task import Task
from openppo.sources.work_buffer import Group, WorkBuffer
from openppo.sources.workers import Pause, Workers
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Sample, StopCheck

_POLL_SECONDS = 0.1
ALL_EQUAL = "--dynamic_sampling: {} groups in a row had equal rewards: use other prompts, or a finer reward."
"""Message about so many groups."""


class Coordinator:
    """Coordinator that hands out groups to workers and cuts batches from complete ones.

    Public methods run on the training thread, ``_on_worker`` and ``_on_lost_worker`` on each worker's own thread, all
    under one lock. As soon as the buffer has room, a group of the task that ``schedule`` names is handed out. ``most``
    bounds the groups of the whole run; ``tasks`` are the run's by name. With ``pauses``, workers train too: they leave
    their engines when a batch is complete.
    """

    def __init__(
        self,
        buffer: WorkBuffer,
        schedule: TaskSchedule,
        tasks: dict[str, Task],
        most: int,
        n_workers: int,
        pauses: bool,
    ) -> None:
        self.buffer = buffer
        self.schedule = schedule
        self.tasks = tasks
        self.most = most
        self.pauses = pauses
        self._changed = threading.Condition()
        self._next = 0
        self._starts: dict[int, Start] = {}  # running and complete groups
        self._metrics: dict[int, Metrics] = {}  # complete groups
        self._failed: list[Sample] = []  # stand-ins for the last failed episodes
        self._begun = False
        self._n_wanted = 0  # groups of the wanted batch
        self._batch: list[Group] | None = None
        self._fault: Exception | None = None
        self.workers = Workers(n_workers, self._changed, self._on_worker, gone=self._on_lost_worker)

    def advance(self, version: int, synced: bool) -> None:
        """Record that the policy has reached ``version``; if ``synced``, samplers have its weights."""
        with self._changed:
            self.buffer.advance(version)
            self.schedule.advance()
            if synced:
                self.buffer.sync(version)
            self._hand_out()

    def pause_for(self, version: int) -> None:
        """Tell all workers, once connected, to leave their engines for the weights of ``version``."""
        with self._changed:
            while not self.workers.are_here and self._fault is None:
                self._wait()
            self.workers.tell(Pause("weights", version))

    def want_batch(self, n_groups: int) -> None:
        """Request a batch, cut as soon as so many groups are complete; the first request starts the workers."""
        with self._changed:
            self._begun = True
            self._n_wanted = n_groups
            self._cut()
            self._hand_out()  # dropped stale groups have made room

    def wait_for_batch(self, stop: StopCheck) -> tuple[list[Group], Metrics] | None:
        """Return the groups of the wanted batch and their metrics; None if a signal comes first.

        ``NothingTrainedError`` if workers return only failures, ``DistNetworkError`` if a worker is lost.
        """
        with self._changed:
            while self._batch is None and not self._fault and not stop.requested():
                self._wait()
            if self._fault:
                raise self._fault
            if self._batch is None:
                return None

            batch = self._batch
            self._batch = None
            self._n_wanted = 0
            metrics = Metrics()
            for group in batch:
                metrics.merge(self._metrics.pop(group[0].group, Metrics()))
            self.buffer.measure(metrics)
            self.schedule.measure(metrics)
            self._hand_out()
            return batch, metrics

    def take_failed(self) -> list[Sample]:
        """Return stand-ins for the last episodes that failed since the previous call."""
        with self._changed:
            failed = self._failed
            self._failed = []
            return failed

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer and the schedule as JSON; a resumed run plays running groups again."""
        with self._changed:
            state = self.buffer.state_dict()
            complete = {self._starts[number]: group for number, group in state["groups"].items()}
            running = [self._starts[number] for number in self.buffer.running]
            groups, lost = _saved(complete, self.tasks)
            state["submitted"] -= len(lost)
            return {
                **state,
                "groups": groups,
                "next": self._next,
                "schedule": self.schedule.state_dict(running, lost),
                "joined": [task.fields for task in self.workers.joined],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state whose tasks are all here; its running groups are played again once a batch is wanted."""
        with self._changed:
            self.schedule.load_state_dict(state["schedule"])

            self._starts = {}
            groups: dict[int, Group] = {}
            for saved in state["groups"]:
                start = Start(**saved["start"])
                prompt = self.tasks[start.task].prompt(start.index)
                self._starts[start.number] = start
                groups[start.number] = from_json(saved, prompt)
            self.buffer.load_state_dict({**state, "groups": groups})

            self._next = state["next"]
            self._batch = None
            self._metrics = {}
            self._begun = False
            self._n_wanted = 0

    def progress(self) -> dict[str, dict[str, float]]:
        """Return each task's progress as numbers by name."""
        with self._changed:
            return self.schedule.progress()

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Change a task as ``TaskSchedule.change`` does, and hand out groups accordingly."""
        with self._changed:
            self.schedule.change(name, ratio, max_concurrent)
            self._hand_out()

    def join(self, task: Task) -> None:
        """Add a task; ``ValueError`` if there is one of that name."""
        with self._changed:
            if task.name in self.tasks:
                raise ValueError(
                    f"there is a task {task.name!r} already: take another name, or change that one."
                )
            self.tasks[task.name] = task
            self.workers.joined.append(replace(task))  # a copy that has cached nothing can be sent
            self.schedule.join(task.name, task.progress)
            self._hand_out()

    def give_back(self, n_groups: int) -> None:
        """Note that groups of the last batch teach nothing, so that others take their places."""
        with self._changed:
            self.buffer.give_back(n_groups)
            self._hand_out()

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self.workers.close()

    def _wait(self) -> None:
        self._changed.wait(_POLL_SECONDS)
        if self.workers.are_here:  # a stalled worker is noticed on its own rank
            current.progress()

    def _on_worker(self, outcome: Outcome | None) -> None:
        """Handle the outcome of a worker's group, or (None) the connection of a worker."""
        if outcome is not None:
            self._take(outcome)
            self._cut()
        self._hand_out()
        self._changed.notify_all()

    def _on_lost_worker(self, rank: int) -> None:
        self._end(DistNetworkError(f"rollout rank {rank} has closed its connection"))

    def _end(self, fault: Exception) -> None:
        """Raise ``fault`` in ``wait_for_batch``; workers that train leave their engines to reach it."""
        self._fault = self._fault or fault
        if self.pauses:
            self.workers.tell(Pause("batch"))
        self._changed.notify_all()

    def _take(self, outcome: Outcome) -> None:
        number = outcome.number
        self._failed = [*self._failed, *outcome.failed][-N_SHOWN:]
        if number not in self.buffer.running:  # dropped by load_state_dict()
            return

        if outcome.samples is None:
            self._drop_failed(outcome)
            return

        start = self._starts[number] if outcome.samples else self._starts.pop(number)
        task = self.tasks[start.task]
        rewards = [sample.total_reward(task.reward_weights) for sample in outcome.samples]
        self.schedule.accept(start, rewards, outcome.seconds)
        if outcome.samples:
            self.buffer.complete(number, outcome.samples)
            self._metrics[number] = outcome.metrics
            return

        self.buffer.drop(number, "filtered")
        if self.buffer.in_vain >= task.most_in_vain:
            self._end(NothingTrainedError(ALL_EQUAL.format(self.buffer.in_vain)))

    def _drop_failed(self, outcome: Outcome) -> None:
        start = self._starts.pop(outcome.number)
        self.buffer.drop(outcome.number, "failed")
        logger.warning("group %d failed and is not trained on: %s", outcome.number, outcome.error)
        try:
            self.schedule.fail(start, outcome.error)
        except NothingTrainedError as error:
            self._end(error)

    def _cut(self) -> None:
        """Cut the batch if it is wanted and complete."""
        if self._n_wanted == 0 or self._batch is not None:
            return

        for number, n_stale in self.buffer.drop_stale().items():
            self.schedule.take_back(self._starts[number], n_stale)
            if number not in self.buffer.buffered:
                del self._starts[number]
                self._metrics.pop(number, None)  # groups restored from a checkpoint have none

        self._batch = self.buffer.cut(self._n_wanted)
        if self._batch is None:
            return
        for group in self._batch:
            del self._starts[group[0].group]
        if self.pauses:
            self.workers.tell(Pause("batch"))

    def _hand_out(self) -> None:
        """Start a group for each free place in the buffer."""
        if not self._begun or self._fault or not self.workers.are_here:
            return

        starts: list[Start] = []
        n_needed = self.most - self.buffer.accepted - len(self.buffer.running)
        for _ in range(min(self.buffer.room(), n_needed)):
            start = self.schedule.next(self._next)
            if start is None:
                break
            self._next = max(self._next, start.number + 1)
            self._starts[start.number] = start
            self.buffer.submit(start.number)
            starts.append(start)
        self.workers.play(starts)


def _saved(
    complete: Mapping[Start, Group], tasks: Mapping[str, Task]
) -> tuple[list[dict[str, Any]], dict[Start, int]]:
    """Return the groups that JSON can hold as JSON, and the number of samples in each other group."""
    groups: list[dict[str, Any]] = []
    lost: dict[Start, int] = {}
    for start, group in complete.items():
        if is_kept_whole(group, tasks[start.task].prompt(start.index)):
            groups.append({"start": vars(start), **as_json(group)})
        else:
            lost[start] = len(group)
    if lost:
        logger.info(
            "%d groups with images of agents are not in the checkpoint, but played again", len(lost)
        )
    return groups, lost
