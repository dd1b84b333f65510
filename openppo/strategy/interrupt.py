"""SIGTERM, SIGINT and SIGHUP as requests: work that can save asks for them and ends by itself; other work ends at once.

Nothing changes before a command opens a ``SignalPipe``.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_requested: str | None = None
_deferred = False
_pipe: SignalPipe | None = None


def installed() -> bool:
    """Whether signals become requests in this process."""
    return _pipe is not None


def requested() -> str | None:
    """Name of the signal that asks the run to save and end; None while there is none.

    On the rank that got the signal at once, on the others about a second later: combine it over ranks.
    """
    return _requested


def request(name: str) -> None:
    """Ask the work of this process to save and end, as signal ``name`` does."""
    global _requested
    _requested = _requested or name


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, a first signal does not end the process: the work there looks at ``requested()`` often, and ends."""
    global _deferred
    _deferred = True
    try:
        yield
    finally:
        _deferred = False


def is_deferred() -> bool:
    """Whether the work under way looks at ``requested()``."""
    return _deferred


class SignalPipe:
    """Receives SIGTERM, SIGINT and SIGHUP by name while open.

    It is opened on the main thread. An ignored SIGHUP, as under ``nohup``, stays ignored unless torchrun passes it on.
    They arrive even while the main thread is inside a collective, where Python's own handlers would have to wait.
    """

    def __init__(self) -> None:
        global _requested, _pipe
        _requested, _pipe = None, self
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        heard = [number for number in _SIGNALS if number != signal.SIGHUP or not _stays_ignored(number)]
        self._handlers = {number: signal.signal(number, _leave_to_the_pipe) for number in heard}
        for number in heard:
            signal.siginterrupt(number, False)  # system calls of C++ libraries go on
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._masks = threading.local()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )

    def wait(self, seconds: float) -> list[str]:
        """Names of the signals that came; none after so many ``seconds``, or a ``wake`` from another thread."""
        if not select.select([self._read], [], [], seconds)[0]:
            return []
        numbers = os.read(self._read, 512)
        return [signal.Signals(number).name for number in numbers if number in _SIGNALS]

    def wake(self) -> None:
        """End a ``wait`` on another thread."""
        os.write(self._write, b"\0")

    def close(self) -> None:
        """Signals do again what they did before."""
        global _pipe
        _pipe = None
        self._restore()
        os.close(self._read)
        os.close(self._write)

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _before_fork(self) -> None:
        """Let signals of the child wait until they are its own: ``multiprocessing`` may end it at once, by SIGTERM."""
        if _pipe is self:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def _after_fork(self) -> None:
        mask = vars(self._masks).pop("before", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _after_fork_in_child(self) -> None:
        """A child would write its signals into our pipe."""
        if _pipe is self:
            self.close()
        self._after_fork()


def _stays_ignored(number: signal.Signals) -> bool:
    by_launcher = number.name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    return signal.getsignal(number) == signal.SIG_IGN and not by_launcher


def _leave_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """The interpreter has written the number into the pipe already."""
