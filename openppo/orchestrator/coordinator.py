"""On the trainers' first rank: hands groups out to the ranks that sample, and cuts batches from what comes back."""

import threading
from collections.abc import Mapping
from typing import Any

from torch.distributed import DistNetworkError

from openppo import logger
from openppo.orchestrator.groups import GroupPlan, Outcome
from openppo.orchestrator.schedule import Start, TaskSchedule
from openppo.orchestrator.work_buffer import Group, WorkBuffer
from openppo.orchestrator.workers import Pause, Workers
from openppo.rollout.episodes import by_episode, episode_reward
from openppo.rollout.failures import N_SHOWN, NothingTrainedError
from openppo.rollout.kept import as_json, from_json, is_kept_whole
from openppo.rollout.tasks import RunTask
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Prompt, StopCheck, Trajectory

_SECONDS_BETWEEN_LOOKS = 0.1
_IN_VAIN = "--dynamic_sampling: {} groups in a row had equal rewards: use other prompts, or a finer reward."


class Coordinator:
    """Public methods run on the training thread, ``_come`` and ``_gone`` on a thread of each worker; one lock for all.

    Groups are handed out as soon as the buffer has room, of the task that ``schedule`` names. ``most`` bounds those
    that the whole run needs, ``plans`` are those of the tasks. With ``pauses`` workers train too: a complete batch
    tells them to leave their engines.
    """

    def __init__(
        self,
        buffer: WorkBuffer,
        schedule: TaskSchedule,
        plans: dict[str, GroupPlan],
        most: int,
        n_workers: int,
        pauses: bool,
    ) -> None:
        self.buffer = buffer
        self.schedule = schedule
        self.plans = plans
        self.most = most
        self.pauses = pauses
        self._changed = threading.Condition()
        self._next = 0
        self._starts: dict[int, Start] = {}  # of groups under way and complete
        self._metrics: dict[int, Metrics] = {}  # of complete groups
        self._failed: list[Trajectory] = []  # stand for the last episodes that failed
        self._begun = self._wanted = False
        self._batch: list[Group] | None = None
        self._fault: Exception | None = None
        self.workers = Workers(n_workers, self._changed, self._come, gone=self._gone)

    def advance(self, version: int, synced: bool) -> None:
        """The policy of ``version`` is trained; ``synced``: what is sampled from now on is sampled with it."""
        with self._changed:
            self.buffer.advance(version)
            self.schedule.advance()
            if synced:
                self.buffer.sync(version)
            self._hand_out()

    def pause_for(self, version: int) -> None:
        """Tell workers to leave their engines for the weights of ``version``, all of them: a resumed run waits here."""
        with self._changed:
            while not self.workers.are_here and self._fault is None:
                self._wait()
            self.workers.tell(Pause("weights", version))

    def want_batch(self) -> None:
        """Cut a batch as soon as there is one; workers begin with the first call."""
        with self._changed:
            self._begun = self._wanted = True
            self._cut()
            self._hand_out()  # also for groups that were found too old

    def wait_for_batch(self, stop: StopCheck) -> tuple[list[Group], Metrics] | None:
        """The batch that was wanted, its groups in order, and their metrics; None if a signal comes first.

        ``NothingTrainedError`` if only failures come back, ``DistNetworkError`` if a worker is gone.
        """
        with self._changed:
            while self._batch is None and not self._fault and not stop.requested():
                self._wait()
            if self._fault:
                raise self._fault
            if self._batch is None:
                return None
            batch, metrics = self._batch, Metrics()
            self._batch, self._wanted = None, False
            for group in batch:
                metrics.merge(self._metrics.pop(group[0].group, Metrics()))
            self.buffer.measure(metrics)
            self.schedule.measure(metrics)
            self._hand_out()
            return batch, metrics

    def take_failed(self) -> list[Trajectory]:
        """Stand-ins for the last episodes that have failed since the last call."""
        with self._changed:
            failed, self._failed = self._failed, []
            return failed

    def state_dict(self) -> dict[str, Any]:
        """What the buffer holds, as JSON, and the groups to be played anew."""
        with self._changed:
            state = self.buffer.state_dict()
            groups, lost = _saved(
                {self._starts[n]: group for n, group in state["groups"].items()}, self.plans
            )
            state["submitted"] -= len(lost)
            joined = [task.fields for task, _ in self.workers.joined]
            schedule = self.schedule.state_dict(
                [self._starts[number] for number in self.buffer.running], lost
            )
            return {
                **state,
                "groups": groups,
                "next": self._next,
                "schedule": schedule,
                "joined": joined,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; groups that were under way then are played anew once a batch is wanted."""
        with self._changed:
            for fields in state["joined"]:
                if fields["name"] not in self.plans:
                    self._add(*self.schedule.newcomer(fields))
            self.schedule.load_state_dict(state["schedule"])
            starts = [Start(**group["start"]) for group in state["groups"]]
            prompts = [self.plans[start.task].prompt(start.index) for start in starts]
            groups = [from_json(*each) for each in zip(state["groups"], prompts, strict=True)]
            self._starts = {start.number: start for start in starts}
            self.buffer.load_state_dict(
                {**state, "groups": dict(zip(self._starts, groups, strict=True))}
            )
            self._next = state["next"]
            self._batch = None
            self._metrics = {}
            self._begun = self._wanted = False

    def progress(self) -> dict[str, dict[str, float]]:
        """What each task has come to."""
        with self._changed:
            return self.schedule.progress()

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """As of ``TaskSchedule``, from now on."""
        with self._changed:
            self.schedule.change(name, ratio, max_concurrent)
            self._hand_out()

    def join(self, fields: dict[str, Any]) -> None:
        """As of ``TaskControl``."""
        task, prompts = self.schedule.newcomer(fields)
        task.check(prompts)
        with self._changed:
            if task.name in self.plans:
                raise ValueError(
                    f"there is a task {task.name!r} already: take another name, or change that one."
                )
            self._add(task, prompts)
            self._hand_out()

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self.workers.close()

    def _add(self, task: RunTask, prompts: list[Prompt]) -> None:
        self.plans[task.name] = GroupPlan.of(task, prompts)
        self.workers.joined.append((task, prompts))
        self.schedule.join(task)

    def _wait(self) -> None:
        self._changed.wait(_SECONDS_BETWEEN_LOOKS)
        if self.workers.are_here:  # and notice themselves if they stall
            current.progress()

    def _come(self, outcome: Outcome | None) -> None:
        """A worker is there, or one of its groups has ended."""
        if outcome is not None:
            self._take(outcome)
            self._cut()
        self._hand_out()
        self._changed.notify_all()

    def _gone(self, rank: int) -> None:
        self._end(DistNetworkError(f"rollout rank {rank} has closed its connection"))

    def _end(self, fault: Exception) -> None:
        """Raise ``fault`` where a batch is waited for, and leave the engines for that."""
        self._fault = self._fault or fault
        if self.pauses:
            self.workers.tell(Pause("batch"))
        self._changed.notify_all()

    def _take(self, outcome: Outcome) -> None:
        number, trajectories = outcome.number, outcome.trajectories
        self._failed = [*self._failed, *outcome.failed][-N_SHOWN:]
        if number not in self.buffer.running:  # of an attempt given up
            return
        start = self._starts[number] if trajectories else self._starts.pop(number)
        if trajectories is None:
            self.buffer.drop(number, "failed")
            logger.warning("group %d failed and is not trained on: %s", number, outcome.error)
            try:
                self.schedule.fail(start, outcome.error)
            except NothingTrainedError as error:
                self._end(error)
            return
        weights = self.plans[start.task].weights
        rewards = [episode_reward(parts, weights) for parts in by_episode(trajectories)]
        self.schedule.accept(start, rewards, outcome.seconds)
        if trajectories:
            self.buffer.complete(number, trajectories)
            self._metrics[number] = outcome.metrics
        else:
            self.buffer.drop(number, "filtered")
            if self.buffer.in_vain >= self.plans[start.task].most_in_vain:
                self._end(NothingTrainedError(_IN_VAIN.format(self.buffer.in_vain)))

    def _cut(self) -> None:
        if not self._wanted or self._batch is not None:
            return
        had = {number: len(by_episode(group)) for number, group in self.buffer.buffered.items()}
        self._batch = self.buffer.cut()
        left = self.buffer.buffered | {group[0].group: group for group in self._batch or []}
        for number, n_episodes in had.items():
            self.schedule.take_back(
                self._starts[number], n_episodes - len(by_episode(left.get(number, [])))
            )
            if number not in self.buffer.buffered:
                del self._starts[number]
            if number not in left:
                self._metrics.pop(number, None)  # there are none after a resume
        if self.pauses and self._batch is not None:
            self.workers.tell(Pause("batch"))

    def _hand_out(self) -> None:
        """Begin a group for each free place of the buffer."""
        if not self._begun or self._fault or not self.workers.are_here:
            return
        starts: list[Start] = []
        for _ in range(
            min(self.buffer.room(), self.most - self.buffer.accepted - len(self.buffer.running))
        ):
            if (start := self.schedule.next(self._next)) is None:
                break
            self._next, self._starts[start.number] = max(self._next, start.number + 1), start
            self.buffer.submit(start.number)
            starts.append(start)
        self.workers.play(starts)


def _saved(
    complete: Mapping[Start, Group], plans: Mapping[str, GroupPlan]
) -> tuple[list[dict[str, Any]], dict[Start, int]]:
    """Groups as JSON, and the number of episodes of those of which a checkpoint cannot have all."""
    groups, lost = list[dict[str, Any]](), dict[Start, int]()
    for start, group in complete.items():
        if is_kept_whole(group, plans[start.task].prompt(start.index)):
            groups.append({"start": vars(start), **as_json(group)})
        else:
            lost[start] = len(by_episode(group))
    if lost:
        logger.info(
            "%d groups with images of agents are not in the checkpoint, but played again", len(lost)
        )
    return groups, lost
