"""SIGTERM, SIGINT and SIGHUP as a flag: training polls it and saves; the watchdog ends other work at once."""

import os
import select
import signal
from typing import Any

import torch

from openppo.types import Comm, Interrupted, StopCheck

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_requested: str | None = None
_pipe: tuple[int, ...] = ()
_handlers: dict[signal.Signals, Any] = {}


def requested() -> str | None:
    """Return the name of the signal that requests to save and exit, None without handlers.

    Other ranks receive it within a second.
    """
    return _requested if _pipe else None


def request(name: str) -> None:
    """Request that the run save and exit, as signal ``name`` does; only the first request counts."""
    global _requested
    _requested = _requested or name


def install() -> None:
    """Install the handlers, on the main thread.

    An ignored SIGHUP (``nohup``) stays ignored unless torchrun passes it on.
    """
    global _pipe, _requested
    _pipe = os.pipe()
    _requested = None

    from_torchrun = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    for number in _SIGNALS:
        is_ignored = number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
        if is_ignored and not from_torchrun:
            continue
        # The handler does nothing: CPython writes the number into the pipe.
        _handlers[number] = signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)  # system calls of C++ libraries restart

    os.set_blocking(_pipe[1], False)
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def receive(seconds: float) -> list[str]:
    """Wait up to ``seconds`` for signals and return their names; ``wake`` ends the wait.

    Works on any thread, even while the main thread is inside C.
    """
    readable, _, _ = select.select([_pipe[0]], [], [], seconds)
    if not readable:
        return []
    received = os.read(_pipe[0], 512)
    return [signal.Signals(number).name for number in received if number in _SIGNALS]


def wake() -> None:
    """End a ``receive`` on another thread."""
    os.write(_pipe[1], b"\0")


def uninstall() -> None:
    """Restore the handlers from before ``install``."""
    global _pipe
    signal.set_wakeup_fd(-1)
    while _handlers:
        signal.signal(*_handlers.popitem())
    for end in _pipe:
        os.close(end)
    _pipe = ()


def _hold_signals() -> None:
    """Block signals before a fork: until ``uninstall`` one to the child would reach the run through the pipe."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _leave_to_parent() -> None:
    if _pipe:
        uninstall()
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_leave_to_parent
)


class SignalStop(StopCheck):
    """``StopCheck`` for signals; never stops a program that has not installed their handlers."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def requested(self) -> bool:
        return requested() is not None

    def __call__(self) -> None:
        if not _pipe:
            return
        is_requested = torch.tensor(int(self.requested()))
        if int(self.comm.all_reduce(is_requested, "max")):
            names = self.comm.all_gather_object(requested())
            raise Interrupted(next(name for name in names if name is not None))
