"""The worker of a rank that samples, which plays groups of the coordinator."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistNetworkError

from openppo.rollout.driver import Leave
from openppo.rollout.engine import Engine
from openppo.sources.outcomes import Outcome, OutcomePlayer
from openppo.sources.workers import Pause, Play
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.links import Link
from openppo.strategy.weights import WeightReceiver, WholeWeights
from openppo.tracking import Metrics
from openppo.tracking.phase import current, phase


class Worker:
    """Player of the coordinator's groups on this rank.

    It plays groups in the loop of the player's driver, at any time; their requests run inside ``drive``. A thread
    receives messages; the loop takes them one by one and sends outcomes.
    """

    def __init__(self, outcomes: OutcomePlayer, link: Link, rank: int, leave: Leave) -> None:
        self.outcomes = outcomes
        self.link = link
        self.leave = leave
        self.driver = outcomes.player.driver
        self._inbox: asyncio.Queue[Play | Pause] = asyncio.Queue()
        self._pauses: asyncio.Queue[Pause | BaseException] = asyncio.Queue()
        self._playing: set[asyncio.Future[Outcome]] = set()
        self._is_ending = False
        self._measured_at = time.monotonic()
        self._measured_wait = self.driver.waited
        link.send(rank)
        serving = asyncio.run_coroutine_threadsafe(self._serve(), self.driver.loop)
        serving.add_done_callback(self._raise_in_drive)
        threading.Thread(target=self._receive, name="messages", daemon=True).start()

    def drive(self) -> Pause:
        """Sample until the coordinator sends a pause; raise the errors of groups."""
        pause = self.driver.drive(self._pauses.get(), self._show, self.leave)
        if isinstance(pause, BaseException):
            raise pause
        return pause

    def _show(self) -> None:
        """Note progress, but not while sources of rewards, which have no time limit, score."""
        if not self.outcomes.is_scoring:
            current.progress()

    def _receive(self) -> None:
        is_end = False
        try:
            with suppress(EOFError, OSError):
                while not is_end:
                    message = self.link.receive()
                    is_end = isinstance(message, Pause) and message.reason == "end"
                    self._is_ending = is_end
                    self._put(self._inbox, message)
        finally:  # also after an error, whose traceback is on stderr
            if not is_end:
                self._put(
                    self._pauses,
                    DistNetworkError("rank 0, which trains, has closed its connection"),
                )
            self.link.close()  # on the thread that reads it

    def _put(self, queue: asyncio.Queue[Any], message: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.driver.loop.call_soon_threadsafe(queue.put_nowait, message)

    async def _serve(self) -> None:
        await self.outcomes.player.start()
        while True:
            message = await self._inbox.get()
            if isinstance(message, Pause):
                self._pauses.put_nowait(message)
                continue
            for task in message.joined:
                await self.outcomes.join(task)
            # Requests that come together enter the engine together, as in one batch.
            with self.driver.hold():
                for start in message.starts:
                    group = asyncio.ensure_future(self.outcomes.play(start))
                    self._playing.add(group)
                    group.add_done_callback(self._send)
                await asyncio.sleep(0)  # each group now holds until its samples have sent requests

    def _raise_in_drive(self, ended: Future[None]) -> None:
        if ended.cancelled():
            return
        error = ended.exception()
        if error is not None:
            self._pauses.put_nowait(error)

    def _send(self, group: asyncio.Future[Outcome]) -> None:
        self._playing.discard(group)
        if self._is_ending or group.cancelled():
            return
        error = group.exception()
        if error is not None:
            self._pauses.put_nowait(error)
            return

        self._measure(group.result().metrics)
        with suppress(OSError):  # the receiving thread reports a coordinator that is gone
            self.link.send(group.result())

    def _measure(self, metrics: Metrics) -> None:
        """Add to ``metrics`` the engine's share of idle time since the last group."""
        now = time.monotonic()
        wait = self.driver.waited
        seconds = now - self._measured_at
        idle_seconds = wait - self._measured_wait
        self._measured_at = now
        self._measured_wait = wait
        metrics.add("async/engine_idle_share", idle_seconds / max(seconds, 1e-9), weight=seconds)


@dataclass(eq=False)
class RolloutRank:
    """The job of a rank of ``--rollout_ranks``, with ``fit`` and ``close`` as a trainer."""

    strategy: InferenceStrategy
    engine: Engine
    weights: WholeWeights
    receiver: WeightReceiver
    worker: Worker

    def fit(self) -> None:
        """Sample until the trainers end."""
        while True:
            current.begin_step(self.engine.version + 1)
            with phase("generation"), self.engine.with_weights(self.weights):
                pause = self.worker.drive()
            if pause.reason == "end":
                return
            with phase("sync"):
                self.receiver.receive()
            self.engine.use_version(pause.version)

    def close(self) -> None:
        """End the agents and leave the process group."""
        self.worker.outcomes.player.close()
        self.strategy.close()
