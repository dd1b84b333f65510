"""On the trainers' first rank: hands groups out to the ranks that sample, and cuts batches from what comes back."""

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError

from openppo import logger
from openppo.orchestrator.groups import Outcome
from openppo.orchestrator.link import Pause
from openppo.orchestrator.saved import as_json, from_json
from openppo.orchestrator.work_buffer import Group, WorkBuffer
from openppo.orchestrator.workers import Workers
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Prompt, StopCheck

FAILURES_IN_A_ROW = 10
"""Groups; then the run ends."""
_SECONDS_BETWEEN_LOOKS = 0.1


class Coordinator:
    """Public methods run on the training thread, ``_come`` and ``_gone`` on a thread of each worker; one lock for all.

    Groups are handed out as soon as the buffer has room. ``most`` bounds those that the whole run needs. With
    ``pauses`` workers train too: a complete batch tells them to leave their engines. ``prompt`` gives the prompt of a
    group.
    """

    def __init__(
        self, buffer: WorkBuffer, prompt: Callable[[int], Prompt], most: int, n_workers: int, pauses: bool
    ) -> None:
        self.buffer, self.prompt, self.most, self.pauses = buffer, prompt, most, pauses
        self._changed = threading.Condition()
        self._next = 0
        self._again: list[int] = []  # groups under way when the checkpoint was written
        self._metrics: dict[int, Metrics] = {}  # of complete groups
        self._begun = self._wanted = False
        self._batch: list[Group] | None = None
        self._failures = 0
        self._fault: Exception | None = None
        self.workers = Workers(n_workers, self._changed, self._come, self._gone)

    def advance(self, version: int, synced: bool) -> None:
        """The policy of ``version`` is trained; ``synced``: what is sampled from now on is sampled with it."""
        with self._changed:
            self.buffer.advance(version)
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

        ``RuntimeError`` if only failures come back, ``DistNetworkError`` if a worker is gone.
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
            self._metrics = {n: kept for n, kept in self._metrics.items() if n in self.buffer.buffered}
            self.buffer.measure(metrics)
            self._hand_out()
            return batch, metrics

    def state_dict(self) -> dict[str, Any]:
        """What the buffer holds, as JSON, and the groups to be played anew."""
        with self._changed:
            state = self.buffer.state_dict()
            groups = {str(number): as_json(group) for number, group in state.pop("groups").items()}
            return {**state, "groups": groups, "next": self._next, "again": [*self._again, *self.buffer.running]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a state; groups that were under way then are played anew once a batch is wanted."""
        with self._changed:
            saved = {int(number): group for number, group in state["groups"].items()}
            groups = {number: from_json(group, self.prompt(number)) for number, group in saved.items()}
            self.buffer.load_state_dict({**state, "groups": groups})
            self._again, self._next = sorted(state["again"]), state["next"]
            self._batch, self._metrics = None, {}
            self._begun = self._wanted = False

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self.workers.close()

    def _wait(self) -> None:
        self._changed.wait(_SECONDS_BETWEEN_LOOKS)
        current.progress()  # ranks that sample notice themselves if they stall

    def _come(self, outcome: Outcome | None) -> None:
        """A worker is there, or one of its groups has ended."""
        if outcome is not None:
            self._take(outcome)
            self._cut()
        self._hand_out()
        self._changed.notify_all()

    def _gone(self, rank: int) -> None:
        self._fault = self._fault or DistNetworkError(f"rollout rank {rank} has closed its connection")
        self._changed.notify_all()

    def _take(self, outcome: Outcome) -> None:
        number, trajectories = outcome.number, outcome.trajectories
        if trajectories is None:
            self._failures += self.buffer.drop(number, "failed")
            logger.warning("group %d failed and is not trained on: %s", number, outcome.error)
            if self._failures >= FAILURES_IN_A_ROW and self._fault is None:
                what = f"{self._failures} groups in a row failed; the last: {outcome.error}"
                self._fault = RuntimeError(what)
            return
        self._failures = 0
        if not trajectories:
            self.buffer.drop(number, "filtered")
        elif self.buffer.complete(number, trajectories):
            self._metrics[number] = outcome.metrics

    def _cut(self) -> None:
        if self._wanted and self._batch is None and (batch := self.buffer.cut()) is not None:
            self._batch = batch
            if self.pauses:
                self.workers.tell(Pause("batch"))

    def _hand_out(self) -> None:
        """Begin a group for each free place of the buffer."""
        if not self._begun or self._fault or not self.workers.are_here:
            return
        numbers = []
        for _ in range(min(self.buffer.room(), self.most - self.buffer.accepted - len(self.buffer.running))):
            numbers.append(self._again.pop(0) if self._again else self._next)
            self._next = max(self._next, numbers[-1] + 1)
            self.buffer.submit(numbers[-1])
        self.workers.play(numbers)
