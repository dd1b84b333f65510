"""The overlapping form of verl's Agent/Env interface: sampling during training, of bounded staleness."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from openppo.agents.compat import MultiRoundBufferDataset
from openppo.rollout.failures import FailureCount, NothingTrainedError
from openppo.sources.work_buffer import Group, WorkBuffer
from openppo.types import Sample


class _Waiting(NamedTuple):
    """A group that has not begun."""

    group: int
    request_ids: Sequence[str]
    begins: Future[None]


@dataclass
class _Running:
    """A group that has begun: ids of running episodes, and samples of scored ones."""

    missing: set[str]
    n_samples: int
    samples: list[Sample] = field(default_factory=list)


class OverlappingDataset(MultiRoundBufferDataset):
    """Samples of whole groups, for training while agents play others; any thread may call it.

    A group is the samples of one row. ``work`` decides how many groups may run and which are too old, as for the
    trainer's ``--max_staleness`` and ``stale``. A group of several samples is dropped if fewer than two succeed; ten
    dropped groups in a row end the waiting.
    """

    def __init__(
        self, batch_groups: int, max_staleness: int, stale: Literal["drop", "mask"] = "drop"
    ) -> None:
        super().__init__()
        self.work = WorkBuffer(batch_groups, max_staleness, stale)
        self.failures = FailureCount()
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._group_of: dict[str, int] = {}
        self._running: dict[int, _Running] = {}

    def begin_group(self, group: int, request_ids: Sequence[str]) -> Future[None]:
        """Return a future that is done once the group may begin."""
        begins: Future[None] = Future()
        with self._changed:
            self._waiting.append(_Waiting(group, request_ids, begins))
            self._admit()
        return begins

    def notify_score(
        self, request_id: str, score: float | None, total_round_count: int | None = None
    ) -> None:
        """Note that an episode has ended; its group is complete with the last one."""
        sample = self.scored(request_id, score, total_round_count)
        with self._changed:
            group = self._group_of.pop(request_id)
            running = self._running[group]
            running.missing.remove(request_id)
            if sample is not None:
                running.samples.append(sample)
            if running.missing:
                return

            del self._running[group]
            if len(running.samples) < min(2, running.n_samples):
                self.work.drop(group, "failed")
                self.failures.add_group(
                    f"too few episodes of group {group} have a score; the log says why"
                )
            else:
                self.failures.add_group(None)
                self.work.complete(group, running.samples)
            self._admit()
            self._changed.notify_all()

    def take_groups(self, timeout: float | None = None) -> list[Sample]:
        """Wait for the next ``batch_groups`` groups and return their samples; none after ``timeout`` seconds.

        ``NothingTrainedError`` if too many groups in a row have failed.
        """
        with self._changed:
            groups = self._changed.wait_for(self._cut_or_raise, timeout) or []
        return [sample for group in groups for sample in group]

    def advance(self, version: int) -> None:
        """Note that ``version`` global steps are trained, and that the engine has their weights."""
        with self._changed:
            self.work.advance(version)
            self.work.sync(version)
            self._admit()

    def _cut_or_raise(self) -> list[Group] | None:
        groups = self._cut()
        if groups is not None:
            return groups

        message = self.failures.groups_message()
        if message:
            raise NothingTrainedError(message)
        return None

    def _cut(self) -> list[Group] | None:
        groups = self.work.cut()
        self._admit()  # dropped groups have left room
        return groups

    def _admit(self) -> None:
        while self._waiting and self.work.room() > 0:
            waiting = self._waiting.popleft()
            if not waiting.begins.set_running_or_notify_cancel():
                continue

            self.work.submit(waiting.group)
            self._group_of |= dict.fromkeys(waiting.request_ids, waiting.group)
            self._running[waiting.group] = _Running(
                set(waiting.request_ids), n_samples=len(waiting.request_ids)
            )
            waiting.begins.set_result(None)
