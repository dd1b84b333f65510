"""The overlapping form of verl's Agent/Env interface: turns are sampled during training, none older than a bound."""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

from openppo.agents.compat import MultiRoundBufferDataset
from openppo.orchestrator.work_buffer import WorkBuffer
from openppo.rollout.failures import FailureCount, NothingTrainedError
from openppo.types import Trajectory


class OverlappingDataset(MultiRoundBufferDataset):
    """Turns of whole groups, the samples of one row, for training while agents play others; any thread may call it.

    ``work`` decides how many groups may be under way and which are too old, as for ``--max_staleness`` and ``--stale``
    of the trainer. A group of several samples is dropped if fewer than two succeed; ten in a row end the waiting.
    """

    def __init__(
        self, batch_groups: int, max_staleness: int, stale: Literal["drop", "mask"] = "drop"
    ) -> None:
        super().__init__()
        self.work = WorkBuffer(batch_groups, max_staleness, stale)
        self.failures = FailureCount()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[str], Future[None]]] = deque()
        self._group_of: dict[str, int] = {}
        self._under_way: dict[int, tuple[set[str], list[list[Trajectory]], int]] = {}

    def begin_group(self, group: int, request_ids: Sequence[str]) -> Future[None]:
        """The result is there once the group may begin."""
        begins: Future[None] = Future()
        with self._changed:
            self._waiting.append((group, request_ids, begins))
            self._admit()
        return begins

    def notify_score(
        self, request_id: str, score: float | None, total_round_count: int | None = None
    ) -> None:
        """An episode has ended; its group is complete with the last one."""
        turns = self.scored(request_id, score, total_round_count)
        with self._changed:
            group = self._group_of.pop(request_id)
            missing, members, n_samples = self._under_way[group]
            missing.remove(request_id)
            members += [turns] if turns else []
            if missing:
                return
            del self._under_way[group]
            if len(members) < min(2, n_samples):
                self.work.drop(group, "failed")
                self.failures.add_group(
                    f"too few episodes of group {group} have a score; the log says why"
                )
            else:
                self.failures.add_group(None)
                self.work.complete(group, [turn for member in members for turn in member])
            self._admit()
            self._changed.notify_all()

    def take_groups(self, timeout: float | None = None) -> list[Trajectory]:
        """The turns of the next ``batch_groups`` groups; waits for them, and returns none after ``timeout`` seconds.

        ``NothingTrainedError`` if too many groups in a row have failed.
        """
        with self._changed:
            groups = self._changed.wait_for(self._cut_or_raise, timeout) or []
        return [turn for group in groups for turn in group]

    def advance(self, version: int) -> None:
        """So many global steps are trained, and the engine has their weights."""
        with self._changed:
            self.work.advance(version)
            self.work.sync(version)
            self._admit()

    def _cut_or_raise(self) -> list[list[Trajectory]] | None:
        groups = self._cut()
        if groups is None and (message := self.failures.groups_message()):
            raise NothingTrainedError(message)
        return groups

    def _cut(self) -> list[list[Trajectory]] | None:
        groups = self.work.cut()
        self._admit()  # what was too old has left room
        return groups

    def _admit(self) -> None:
        while self._waiting and self.work.room() > 0:
            group, request_ids, begins = self._waiting.popleft()
            if begins.set_running_or_notify_cancel():
                self.work.submit(group)
                self._group_of |= dict.fromkeys(request_ids, group)
                self._under_way[group] = set(request_ids), [], len(request_ids)
                begins.set_result(None)
