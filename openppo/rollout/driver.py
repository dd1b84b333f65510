"""A driver that steps an engine for coroutines in an event loop on another thread."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from openppo.media import Tokens
from openppo.rollout.engine import Engine
from openppo.tracking.phase import current
from openppo.types import Completion, SamplingParams, StopCheck

T = TypeVar("T")
Leave = Literal["abandon", "drain", "continue", "abort"]
"""Fate of running requests when the work is done; abort restarts them at the next ``drive``."""

LONGEST_WAIT = 0.02
"""Seconds to wait for requests before ranks check again if any of them has work."""
_SECONDS_BETWEEN_TICKS = 0.05
"""Seconds between two looks at whether the loop still runs."""
_SECONDS_TO_END = 5.0
"""Seconds for cancelled coroutines to clean up when the loop ends."""
_SECONDS_TO_CLEAN_UP = 10.0
"""Seconds before work is cancelled again after a signal, since libraries sometimes lose a cancellation."""

_EPISODE: ContextVar[object] = ContextVar("episode", default=None)


def episode_context() -> Context:
    """Return a context in which the code of an episode can cancel only its own tasks."""
    context = copy_context()
    context.run(_EPISODE.set, object())
    return context


class _EpisodeTask(asyncio.Task[Any]):
    """A task that only its own episode can cancel.

    Some agents cancel ``asyncio.all_tasks``, which has tasks of other episodes and of the driver, too.
    """

    def __init__(self, coroutine: Any, *, context: Context | None = None, **options: Any) -> None:
        super().__init__(coroutine, context=context, **options)
        self._episode = _EPISODE.get() if context is None else context.get(_EPISODE)

    def cancel(self, msg: Any | None = None) -> bool:
        may_cancel = _EPISODE.get() in (None, self._episode)
        return may_cancel and super().cancel(msg)


def agent_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop for players of samples."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(lambda loop, work, **options: _EpisodeTask(work, loop=loop, **options))
    return loop


@dataclass(eq=False)
class _Request:
    prompt: Tokens
    params: SamplingParams
    seed: int
    park: bool
    continue_from: int | None
    answer: asyncio.Future[Completion]
    number: int | None = None
    """The engine's number, once it is submitted."""

    def submit_to(self, engine: Engine) -> int:
        """Queue the request in ``engine``; return and keep its number there."""
        self.number = engine.submit(
            self.prompt,
            self.params,
            self.seed,
            park=self.park,
            continue_from=self.continue_from,
        )
        return self.number


class EngineDriver:
    """Coroutines of ``loop`` await ``generate``; ``drive`` runs the engine until their work is done.

    Between steps, the driver takes requests and cancellations from one queue and hands completions to the loop.
    ``drive`` waits for requests at most ``LONGEST_WAIT`` at a time. Ranks in lockstep take equally many steps, also a
    rank whose coroutines all wait for tools. Coroutines may outlive the work: their requests wait for the next
    ``drive``. ``waited`` counts seconds in ``drive`` without requests, ``stood`` seconds outside of it.
    """

    def __init__(self, engine: Engine, stop: StopCheck | None = None) -> None:
        self.engine = engine
        self.any_rank = engine.any_rank or (lambda flag: flag)
        self.stop = stop or StopCheck()
        self.loop = agent_loop()
        self.steps = 0
        self.waited = 0.0
        self._stood = 0.0
        self._left_at = time.monotonic()  # math.inf inside drive()
        self._loop_runs = True
        self._inbox: SimpleQueue[list[_Request]] = SimpleQueue()
        self._held: list[_Request] = []
        self._n_holding = 0
        self._under_way: dict[int, _Request] = {}
        self._ended: deque[tuple[_Request, Completion]] = deque()
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        continue_from: int | None = None,
        park: bool = True,
    ) -> Completion:
        """Sample one completion, awaited in ``loop``; cancelling it frees the row within one step."""
        request = _Request(
            prompt,
            params,
            seed,
            park=park,
            continue_from=continue_from,
            answer=self.loop.create_future(),
        )
        if self._n_holding == 0:
            self._inbox.put([request])
        else:
            self._held.append(request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._inbox.put([request])  # the engine's thread sees the cancelled answer
            raise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold requests made inside, in ``loop``; then submit them together, in the order of ``Engine.generate``.

        So they are sampled exactly as ``Engine.generate`` does. When several hold, the last to end submits.
        """
        self._n_holding += 1
        try:
            yield
        finally:
            self._n_holding -= 1
            if self._n_holding == 0:
                held = self._held
                self._held = []
                prompts = [request.prompt for request in held]
                self._inbox.put([held[i] for i in self.engine.order(prompts)])

    def drive(
        self,
        work: Coroutine[Any, Any, T],
        show: Callable[[], None] = current.progress,
        leave: Leave = "abandon",
    ) -> T:
        """Run ``work`` in the loop while this thread steps the engine; return its result.

        All ranks call it together. ``show`` is called between steps, as long as the loop runs. A signal raises
        ``Interrupted`` on all ranks: the work is cancelled, repeatedly if it swallows that.
        """
        self._stood = self.stood
        self._left_at = math.inf
        task = asyncio.run_coroutine_threadsafe(self._begin(work), self.loop).result()
        cancel_at = 0.0
        tick_at = 0.0
        try:
            while True:
                is_done = task.done()
                if is_done:
                    self._leave(leave)
                else:
                    self._take_in()
                    if self.stop.requested() and time.monotonic() >= cancel_at:
                        self.loop.call_soon_threadsafe(task.cancel)
                        cancel_at = time.monotonic() + _SECONDS_TO_CLEAN_UP

                stays = is_done and leave == "continue"
                if self.any_rank(self.engine.busy and not stays):
                    self.engine.step()
                    self.steps += 1
                    self._hand_out()
                elif self.any_rank(not is_done):
                    self._wait()
                else:
                    break

                # User code that blocks the loop is no progress. To ask at each step would slow down small models.
                if self._loop_runs and time.monotonic() >= tick_at:
                    self._loop_runs = False
                    self.loop.call_soon_threadsafe(self._tick)
                    show()
                    tick_at = time.monotonic() + _SECONDS_BETWEEN_TICKS
        finally:
            self._left_at = time.monotonic()
            if not task.done():  # the engine raised
                self.loop.call_soon_threadsafe(task.cancel)

        self.stop()
        if task.cancelled():
            raise RuntimeError(
                "what samples was cancelled, by no signal: look for what cancels tasks of its loop."
            )
        return task.result()

    @property
    def stood(self) -> float:
        """Idle seconds of the engine, excluded from the time limits of episodes."""
        return self._stood + max(0.0, time.monotonic() - self._left_at)

    def close(self) -> None:
        """Cancel the tasks of the loop; stop it and its thread."""
        asyncio.run_coroutine_threadsafe(end_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _tick(self) -> None:
        self._loop_runs = True

    async def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start the work, and wake the engine's thread when it ends."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._inbox.put([]))
        return task

    def _leave(self, leave: Leave) -> None:
        """Cancel or restart running requests once the work is done, unless they drain or continue."""
        if leave in ("drain", "continue"):
            return
        for number, request in self._under_way.items():
            self.engine.cancel(number)
            if leave == "abandon":
                self.loop.call_soon_threadsafe(request.answer.cancel)
        if leave == "abort" and self._under_way:
            self._inbox.put(list(self._under_way.values()))
        self._under_way = {}

    def _wait(self) -> None:
        """Block until a request comes, at most ``LONGEST_WAIT``."""
        start = time.monotonic()
        self._take_in(LONGEST_WAIT)
        self.waited += time.monotonic() - start

    def _take_in(self, wait: float = 0.0) -> None:
        """Submit and cancel the requests of the queue; with ``wait`` seconds block for the first."""
        try:
            while True:
                requests = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
                wait = 0.0
                for request in requests:
                    if request.answer.cancelled():
                        self._cancel(request)
                    else:
                        self._submit(request)
        except Empty:
            pass

    def _cancel(self, request: _Request) -> None:
        number = request.number
        if number is not None and self._under_way.pop(number, None) is not None:
            self.engine.cancel(number)

    def _submit(self, request: _Request) -> None:
        try:
            number = request.submit_to(self.engine)
        except ValueError as error:  # a prompt that the engine cannot read
            self.loop.call_soon_threadsafe(_fail, request.answer, error)
            return
        self._under_way[number] = request

    def _hand_out(self) -> None:
        ended = self.engine.collect()
        for number, completion in ended.items():
            request = self._under_way.pop(number, None)
            if request is not None:
                self._ended.append((request, completion))
        if ended:
            self.loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """Settle one request in each pass of the loop, so that other coroutines run in between."""
        if not self._ended:
            return
        request, completion = self._ended.popleft()
        if not request.answer.done():
            request.answer.set_result(completion)
        self.loop.call_soon(self._settle)


def _fail(answer: asyncio.Future[Completion], error: ValueError) -> None:
    if not answer.done():
        answer.set_exception(error)


async def end_tasks() -> None:
    """Cancel all other tasks of the loop and give them time to clean up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_SECONDS_TO_END)
