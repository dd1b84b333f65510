"""Drive an engine on the caller's thread for coroutines in an event loop on another."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from openppo.media import Media
from openppo.rollout.engine import Engine
from openppo.tracking.phase import current
from openppo.types import Completion, SamplingParams, StopCheck

T = TypeVar("T")
Leave = Literal["abandon", "drain", "continue", "abort"]
"""What becomes of requests under way when the work is done: they are cancelled, end first, stay, or begin anew."""

LONGEST_WAIT = 0.02
"""Seconds that the engine waits for requests before ranks agree again on whether anything runs anywhere."""
_SECONDS_TO_END = 5.0
"""For coroutines that are cancelled when the loop ends."""
_SECONDS_TO_CLEAN_UP = 10.0
"""For work that a signal has cancelled, until it is cancelled again: libraries lose a cancellation now and then."""


_EPISODE: ContextVar[object] = ContextVar("episode", default=None)


def episode_context() -> Context:
    """A context for the code of one episode, in which it can cancel no tasks but its own."""
    context = copy_context()
    context.run(_EPISODE.set, object())
    return context


class _Task(asyncio.Task[Any]):
    """A task of a loop of agents: ``asyncio.all_tasks``, which some cancel, has those of others and ours, too."""

    def __init__(self, coroutine: Any, *, context: Context | None = None, **options: Any) -> None:
        super().__init__(coroutine, context=context, **options)
        self._episode = _EPISODE.get() if context is None else context.get(_EPISODE)

    def cancel(self, msg: Any | None = None) -> bool:
        return _EPISODE.get() in (None, self._episode) and super().cancel(msg)


def agent_loop() -> asyncio.AbstractEventLoop:
    """An event loop for agents and what samples for them."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(lambda loop, work, **options: _Task(work, loop=loop, **options))
    return loop


@dataclass(eq=False)
class _Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int
    park: bool
    continue_from: int | None
    media: Media
    answer: asyncio.Future[Completion]
    number: int | None = None  # of the engine, once it is submitted


class EngineDriver:
    """Coroutines of ``loop`` await ``generate``; ``drive`` runs the engine until their work is done.

    The engine's steps consume requests and cancellations from one queue and hand completions to the loop. ``drive``
    waits for requests at most ``LONGEST_WAIT`` at a time. Ranks in lockstep take equally many steps: one whose
    coroutines all wait for tools takes part. Coroutines may outlive the work: their requests wait for the next
    ``drive``. ``waited`` are seconds without requests in it, ``stood`` those outside of it.
    """

    def __init__(self, engine: Engine, stop: StopCheck | None = None) -> None:
        self.engine = engine
        self.any_rank = engine.any_rank or (lambda flag: flag)
        self.stop = stop or StopCheck()
        self.loop = agent_loop()
        self.steps, self.waited = 0, 0.0
        self._stood, self._left_at = 0.0, time.monotonic()  # math.inf while it is driven
        self._loop_runs = True
        self._inbox: SimpleQueue[list[_Request]] = SimpleQueue()
        self._held: list[_Request] | None = None
        self._under_way: dict[int, _Request] = {}
        self._ended: asyncio.Queue[tuple[Any, Completion, asyncio.Future[Completion]]] = (
            asyncio.Queue()
        )
        self._thread = threading.Thread(target=self.loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._hand_over(), self.loop)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        continue_from: int | None = None,
        park: bool = True,
        media: Media = (),
    ) -> Completion:
        """Sample one completion, awaited in ``loop``; cancelling it frees the row within one step."""
        request = _Request(
            prompt_ids,
            params,
            seed,
            park=park,
            continue_from=continue_from,
            media=media,
            answer=self.loop.create_future(),
        )
        if self._held is None:
            self._inbox.put([request])
        else:
            self._held.append(request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self._inbox.put([request])  # its answer is cancelled, which the engine's thread sees
            raise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Requests made inside, in ``loop``, enter the engine together, in the order that its ``generate`` gives them.

        So they are sampled as that samples them, to the bit.
        """
        held: list[_Request] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            self._inbox.put(
                [held[i] for i in self.engine.order([request.prompt_ids for request in held])]
            )

    def drive(
        self,
        work: Coroutine[Any, Any, T],
        show: Callable[[], None] = current.progress,
        leave: Leave = "abandon",
    ) -> T:
        """The result of ``work``, which runs in the loop, while this thread steps the engine; all ranks together.

        ``show`` is called between steps, as long as the loop runs.
        ``Interrupted`` on all ranks upon a signal: the work is cancelled, again and again if something swallows that.
        """
        self._stood, self._left_at = self.stood, math.inf
        task = asyncio.run_coroutine_threadsafe(self._begin(work), self.loop).result()
        cancel_at = 0.0
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
                if self._loop_runs:  # user code that blocks the loop is no progress
                    self._loop_runs = False
                    self.loop.call_soon_threadsafe(self._tick)
                    show()
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
        """Seconds in which nobody drove the engine; no time limit of an episode counts them."""
        return self._stood + max(0.0, time.monotonic() - self._left_at)

    def close(self) -> None:
        """Cancel what still runs in the loop; end it and its thread."""
        asyncio.run_coroutine_threadsafe(end_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _tick(self) -> None:
        self._loop_runs = True

    async def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start the work; the engine's thread is woken when it ends."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._inbox.put([]))
        return task

    def _leave(self, leave: Leave) -> None:
        """Deal with requests under way once the work is done."""
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
        """Block until a request comes, for a moment."""
        start = time.monotonic()
        self._take_in(LONGEST_WAIT)
        self.waited += time.monotonic() - start

    def _take_in(self, wait: float = 0.0) -> None:
        """Submit and cancel what is in the queue; with ``wait`` seconds block for the first."""
        try:
            while True:
                requests = self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
                wait = 0.0
                for request in requests:
                    if not request.answer.cancelled():
                        self._submit(request)
                    elif (
                        request.number is not None
                        and self._under_way.pop(request.number, None) is not None
                    ):
                        self.engine.cancel(request.number)
        except Empty:
            pass

    def _submit(self, request: _Request) -> None:
        try:
            given = request.params, request.seed, request.park, request.continue_from
            more: dict[str, Any] = {"media": request.media} if request.media else {}
            number = self.engine.submit(request.prompt_ids, *given, **more)
        except ValueError as error:  # a prompt that the engine cannot read
            self.loop.call_soon_threadsafe(
                _settle, request.answer.set_exception, error, request.answer
            )
            return
        request.number = number
        self._under_way[number] = request

    def _hand_out(self) -> None:
        for number, completion in self.engine.collect().items():
            if request := self._under_way.pop(number, None):
                outcome = request.answer.set_result, completion, request.answer
                self.loop.call_soon_threadsafe(self._ended.put_nowait, outcome)

    async def _hand_over(self) -> None:
        """Settle one request in each pass of the loop: what else runs there need not wait for all of a step."""
        while True:
            _settle(*await self._ended.get())
            await asyncio.sleep(0)


def _settle(
    set_outcome: Callable[[Any], None], outcome: Any, answer: asyncio.Future[Completion]
) -> None:
    if not answer.done():
        set_outcome(outcome)


async def end_tasks() -> None:
    """Cancel all other tasks of the loop and give them time to clean up."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_SECONDS_TO_END)
