"""Code of users on threads: what it returns or raises reaches who awaits it."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Worker:
    """One thread for calls in their order: a daemon, so that one that hangs does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.last: Future[Any] = Future()
        Thread(target=self._run, name="code of users", daemon=True).start()

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Result of a function; a coroutine is awaited in the event loop."""
        self.last = Future()
        self._calls.put((self.last, partial(function, *arguments, **named)))
        made = await asyncio.wrap_future(self.last)
        return await made if inspect.isawaitable(made) else made

    def end(self) -> None:
        """End the thread after its last call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (begun := self._calls.get()) is not None:
            future, work = begun
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except (Exception, SystemExit) as error:  # noqa: BLE001 (raised again where it is awaited)
                    future.set_exception(error)


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Result of a coroutine function, or of a plain one, which runs on a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    worker = Worker()
    try:
        return await worker.call(function, *arguments, **named)
    finally:
        worker.end()
