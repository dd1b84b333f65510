"""The coordinator's end of its connections to the ranks that sample, and what it says there."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import Literal

from openppo.orchestrator.groups import Outcome
from openppo.orchestrator.schedule import Start
from openppo.rollout.tasks import RunTask
from openppo.strategy.links import Entrance, Link
from openppo.types import Prompt


@dataclass(frozen=True)
class Play:
    """Play these groups; tasks that have ``joined`` meanwhile come with their prompts."""

    starts: list[Start]
    joined: list[tuple[RunTask, list[Prompt]]]


@dataclass(frozen=True)
class Pause:
    """Leave the engine: for ``weights`` of ``version``, for a ``batch`` that is complete, or at the ``end``."""

    reason: Literal["weights", "batch", "end"]
    version: int = -1


class Workers:
    """``n_workers`` ranks of the launch. ``come`` and ``gone`` are called on a thread of each, ``come`` with outcomes.

    They are called with ``lock`` held, and so are the methods here.
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
        self.entrance = Entrance()  # until all are here
        self._links: dict[int, Link] = {}  # by launch rank
        self._load: Counter[int] = Counter()  # groups under way
        self.joined: list[tuple[RunTask, list[Prompt]]] = []
        self._knows: Counter[int] = Counter()  # of these
        self._is_closed = False
        threading.Thread(target=self._accept, name="coordinator", daemon=True).start()

    @property
    def are_here(self) -> bool:
        """Whether all have connected."""
        return len(self._links) == self.n_workers

    def tell(self, pause: Pause) -> None:
        """Send to all; an end that is gone is noticed where it is read."""
        for link in self._links.values():
            with suppress(OSError):
                link.send(pause)

    def play(self, starts: Sequence[Start]) -> None:
        """Give each group to the worker that plays fewest, those of one worker in one message."""
        shares: dict[int, list[Start]] = defaultdict(list)
        for start in starts:
            rank = min(self._links, key=lambda rank: (self._load[rank], rank))
            self._load[rank] += 1
            shares[rank].append(start)
        for rank, share in shares.items():
            joined, self._knows[rank] = self.joined[self._knows[rank] :], len(self.joined)
            with suppress(OSError):
                self._links[rank].send(Play(share, joined))

    def close(self) -> None:
        """End all workers."""
        self._is_closed = True
        self.tell(Pause("end"))
        self.entrance.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                link = self.entrance.accept()
                threading.Thread(
                    target=self._read, args=(link,), name="coordinator", daemon=True
                ).start()

    def _read(self, link: Link) -> None:
        rank: int | None = None  # of a connection that has not said that it is a worker's
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
                        self._load[rank] -= 1
                        self.come(outcome)
        finally:  # also after an error, whose traceback is on stderr
            with self.lock:
                if rank is not None and not self._is_closed:
                    self.gone(rank)
