"""The coordinator's connections to the ranks that sample, and its messages to them."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import Literal

from openppo.sources.outcomes import Outcome
from openppo.sources.schedule import Start
from openppo.sources.task import Task
from openppo.strategy.links import Entrance, Link


@dataclass(frozen=True)
class Play:
    """Message to play groups, with the tasks that have ``joined`` since the last one."""

    starts: list[Start]
    joined: list[Task]


@dataclass(frozen=True)
class Pause:
    """Message to leave the engine for ``weights`` of ``version``, a complete ``batch`` or the ``end``."""

    reason: Literal["weights", "batch", "end"]
    version: int = -1


class Workers:
    """Connections to ``n_workers`` ranks of the launch.

    ``come`` gets None when a worker connects and its outcomes, ``gone`` its rank when the connection ends. They are
    called on a thread of each worker, with ``lock`` held; so must all methods be.
    """

    def __init__(
        self,
        n_workers: int,
        lock: Condition,
        come: Callable[[Outcome | None], None],
        gone: Callable[[int], None],
    ) -> None:
        self.n_workers = n_workers
        self.lock = lock
        self.come = come
        self.gone = gone
        self.entrance = Entrance()  # open until all are connected
        self.joined: list[Task] = []
        # By launch rank:
        self._links: dict[int, Link] = {}
        self._running_groups: Counter[int] = Counter()
        self._n_joined_sent: Counter[int] = Counter()
        self._is_closed = False
        threading.Thread(target=self._accept, name="coordinator", daemon=True).start()

    @property
    def are_here(self) -> bool:
        """True if all workers are connected."""
        return len(self._links) == self.n_workers

    def tell(self, pause: Pause) -> None:
        """Send ``pause`` to all workers; the reading thread notices a worker that is gone."""
        for link in self._links.values():
            with suppress(OSError):
                link.send(pause)

    def play(self, starts: Sequence[Start]) -> None:
        """Hand each group to the worker that plays fewest; send each worker one message."""
        by_rank: dict[int, list[Start]] = defaultdict(list)
        for start in starts:
            rank = min(self._links, key=lambda rank: (self._running_groups[rank], rank))
            self._running_groups[rank] += 1
            by_rank[rank].append(start)

        for rank, rank_starts in by_rank.items():
            joined = self.joined[self._n_joined_sent[rank] :]
            self._n_joined_sent[rank] = len(self.joined)
            with suppress(OSError):
                self._links[rank].send(Play(rank_starts, joined))

    def close(self) -> None:
        """End all workers."""
        self._is_closed = True
        self.tell(Pause("end"))
        self.entrance.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                link = self.entrance.accept()
                reader = threading.Thread(
                    target=self._read, args=(link,), name="coordinator", daemon=True
                )
                reader.start()

    def _read(self, link: Link) -> None:
        rank: int | None = None  # the first message, which only workers send
        try:
            with suppress(EOFError, OSError):
                rank = link.receive()
                with self.lock:
                    self._links[rank] = link
                    if self.are_here:
                        self.entrance.close()
                    self.come(None)
                while True:
                    outcome: Outcome = link.receive()
                    with self.lock:
                        self._running_groups[rank] -= 1
                        self.come(outcome)
        finally:  # also after an error, whose traceback is on stderr
            with self.lock:
                if rank is not None and not self._is_closed:
                    self.gone(rank)
