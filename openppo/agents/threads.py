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
    if inspect.iscoroutinefunction(function):
        return await work()
    future: Future[Any] = Future()
    # A daemon: one that hangs does not keep the process alive, as a thread of a pool would.
    Thread(target=settle, args=(future, work), daemon=True).start()
    made = await asyncio.wrap_future(future)
    return await made if inspect.isawaitable(made) else made


def settle(future: "Future[Any]", work: Callable[[], Any]) -> None:
    """Do ``work`` for ``future``, unless that is cancelled; what it raises is raised where ``future`` is awaited."""

    def hand_over(kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None:
            future.set_exception(error)
        return True

    if future.set_running_or_notify_cancel():
        with ExitStack() as stack:
            stack.push(hand_over)
            future.set_result(work())
