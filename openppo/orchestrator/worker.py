"""A rank that samples: it plays the groups that the coordinator hands out, with the weights that trainers send."""

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistNetworkError

from openppo.orchestrator.groups import GroupPlayer, Outcome
from openppo.orchestrator.workers import Pause, Play
from openppo.rollout.driver import Leave
from openppo.rollout.engine import Engine
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.links import Link
from openppo.strategy.weights import WeightReceiver, WholeWeights
from openppo.tracking import Metrics
from openppo.tracking.phase import current, phase


class Worker:
    """Groups are played in the loop of the sampler's driver, at any time; their requests run inside ``drive``.

    A thread receives messages; the loop takes them one by one and sends outcomes.
    """

    def __init__(self, player: GroupPlayer, link: Link, rank: int, leave: Leave) -> None:
        self.player = player
        self.link = link
        self.leave = leave
        self.driver = player.sampler.driver
        self._inbox: asyncio.Queue[Play | Pause] = asyncio.Queue()
        self._pauses: asyncio.Queue[Pause | BaseException] = asyncio.Queue()
        self._playing: set[asyncio.Future[Outcome]] = set()
        self._is_ending = False
        self._measured = time.monotonic(), self.driver.waited
        link.send(rank)
        asyncio.run_coroutine_threadsafe(self._serve(), self.driver.loop).add_done_callback(
            self._raise_in_drive
        )
        threading.Thread(target=self._receive, name="messages", daemon=True).start()

    def drive(self) -> Pause:
        """Sample until the coordinator says to pause; raises what ended the playing of a group."""
        pause = self.driver.drive(self._pauses.get(), self._show, self.leave)
        if isinstance(pause, BaseException):
            raise pause
        return pause

    def _show(self) -> None:
        """Note progress; of sources of rewards only their answers are some, since they have no time limit."""
        if not self.player.is_scoring:
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
        await self.player.sampler.start()
        while True:
            message = await self._inbox.get()
            if isinstance(message, Pause):
                self._pauses.put_nowait(message)
                continue
            for task, prompts in message.joined:
                await self.player.join(task, prompts)
            with (
                self.driver.hold()
            ):  # requests that come together enter the engine together, as in one batch
                for start in message.starts:
                    group = asyncio.ensure_future(self.player.play(start))
                    self._playing.add(group)
                    group.add_done_callback(self._send)
                for _ in range(3):  # group, sample, request
                    await asyncio.sleep(0)

    def _raise_in_drive(self, ended: Future[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            self._pauses.put_nowait(error)

    def _send(self, group: asyncio.Future[Outcome]) -> None:
        self._playing.discard(group)
        if self._is_ending or group.cancelled():
            return
        if (error := group.exception()) is not None:
            self._pauses.put_nowait(error)
        else:
            self._measure(group.result().metrics)
            with suppress(OSError):  # the coordinator is gone, which the receiving thread says
                self.link.send(group.result())

    def _measure(self, metrics: Metrics) -> None:
        """The share of the time since the last group in which the engine had no requests."""
        then, before = self._measured
        self._measured = now, waited = time.monotonic(), self.driver.waited
        metrics.add(
            "async/engine_idle_share", (waited - before) / max(now - then, 1e-9), weight=now - then
        )


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
            current.step = self.engine.version + 1
            with phase("generation"), self.engine.with_weights(self.weights):
                pause = self.worker.drive()
            if pause.reason == "end":
                return
            with phase("sync"):
                self.receiver.receive()
            self.engine.version = pause.version

    def close(self) -> None:
        """End the agents, and leave the process group."""
        self.worker.player.sampler.close()
        self.strategy.close()
