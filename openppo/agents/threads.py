"""Work of users on threads: what it returns or raises reaches who awaits it."""

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Result of a coroutine function, or of a plain one, which runs on a thread of its own."""
    work = partial(function, *arguments, **named)
    try:
        if inspect.iscoroutinefunction(function):
            return await work()
        future: Future[Any] = Future()
        # A daemon: one that hangs does not keep the process alive, as a thread of a pool would.
        Thread(target=settle, args=(future, work), daemon=True).start()
        made = await asyncio.wrap_future(future)
        return await made if inspect.isawaitable(made) else made
    except SystemExit as error:  # it would end the event loop of all episodes
        raise RuntimeError("it called sys.exit()") from error


def settle(future: "Future[Any]", work: Callable[[], Any]) -> None:
    """Do ``work`` for ``future``, unless that is cancelled."""
    if future.set_running_or_notify_cancel():
        with ExitStack() as stack:
            stack.push(partial(_hand_over, future))
            future.set_result(work())


def _hand_over(future: "Future[Any]", kind: Any, error: BaseException | None, trace: Any) -> bool:
    """Let what ``work`` raises be raised where its outcome is awaited."""
    if error is not None:
        future.set_exception(error)
    return True
