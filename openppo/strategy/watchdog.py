"""The watchdog: a thread of each rank that sends heartbeats, checks those of the others, and ends a failed run."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol

from openppo.config import RunConfig, mask_credentials
from openppo.strategy import fault_report, signals
from openppo.strategy.fault_report import Fault
from openppo.strategy.heartbeats import Heartbeat, HeartbeatStore

_INTERVAL = 0.5
_LINGER = 3 * _INTERVAL
"""Seconds until all ranks know the exit status; then the store may go."""
_SECONDS_FOR_RANK_0 = 10.0
"""To find the same mistake of the user, which is then reported by rank 0 alone."""
_SECONDS_TO_CLOSE = 20.0
"""For trackers to be closed after an error."""
_SECONDS_TO_END = 10.0
_SIGNALLED = 128
"""Exit status of a process ended by a signal, less the signal's number, as in shells."""
_FAILURES = (OSError, RuntimeError, MemoryError, LookupError, ValueError, TypeError)
"""What a look may raise: no file or memory to be had, a value of the store that is not whole."""
_ECHO = 2.0
"""Seconds within which two signals count as one: launchers pass on what Slurm and Ctrl-C send to all processes."""


class CurrentPhase(Protocol):
    """Position of the training thread (``openppo.tracking.phase``)."""

    phase: str
    step: int
    last_progress: float
    failing: tuple[BaseException, float] | None


class _Verdict(NamedTuple):
    """How this process ends unless another rank reports before ``due``."""

    text: Callable[[], str]
    status: int
    due: float
    error: BaseException | None = None


class Watchdog:
    """Around all work of a command, on its main thread: ``with Watchdog(...) as watchdog: ...``.

    If a rank raises, vanishes or stalls, all ranks end within ``heartbeat_timeout`` and a few seconds, with exit status
    1 and one report on stderr that names rank, phase and step. Signals are as in ``openppo.strategy.signals``.
    ``options`` are those of the command by name; ``resume`` says how to continue after a failure. ``launch_rank`` and
    ``n_processes`` count all processes of the launcher, which need not be one training group.
    """

    def __init__(
        self,
        limits: RunConfig,
        where: CurrentPhase,
        options: Mapping[str, Any],
        resume: str = "",
        launch_rank: int | None = None,
        n_processes: int | None = None,
    ) -> None:
        self.explain_memory: Callable[[], Sequence[str]] = list
        """Lines for a report of an out-of-memory error: what each model takes."""
        self.saves_on_signal = False
        """Whether the work under way polls ``signals.requested()``; other work ends at the first signal."""
        self._limits, self._where, self._options, self._resume = limits, where, options, resume
        self._rank = int(os.environ.get("RANK", "0")) if launch_rank is None else launch_rank
        n_processes = n_processes or int(os.environ.get("WORLD_SIZE", "1"))
        self._store = HeartbeatStore(self._rank, n_processes, limits.heartbeat_timeout) if n_processes > 1 else None
        self._verdict: _Verdict | None = None
        self._signal: tuple[str, float] | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        signals.install()
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # a crash in C leaves the Python stacks on stderr
        self._set_timer()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and (self._store is None or not error.code)):
            self._leaving.set()
        else:
            self._verdict = self._raised(error)
        signals.wake()
        self._thread.join()  # after an error it ends the process
        signals.uninstall()

    def refuse(self, message: str) -> NoReturn:
        """Report a mistake of the user, found before training: one line on stderr for all ranks, exit status 2."""
        if self._store is None:
            _write(f"error: {message}\n")
            sys.exit(2)
        rank = f" on rank {self._rank}" if self._rank else ""
        due = time.monotonic() + (_SECONDS_FOR_RANK_0 if self._rank else 0)
        self._verdict = _Verdict(lambda: f"error{rank}: {message}\n", 2, due)
        signals.wake()
        self._thread.join()
        raise AssertionError("the watchdog ends the process")

    def _set_timer(self) -> None:
        """End the process, from C, if no look succeeds in time: a thread holds Python's lock, or the store is silent.

        The timer prints the stacks alone, so each look runs in a frame whose file name is the position.
        """
        faulthandler.dump_traceback_later(0.9 * self._limits.heartbeat_timeout, exit=True, file=2)

    def _run(self) -> None:
        while not self._leaving.is_set():
            try:
                code = _call.__code__.replace(co_filename=f"OpenPPO {self._heartbeat()}")
                FunctionType(code, {})(self._look)
                self._set_timer()
            except _FAILURES:
                error = self._verdict and self._verdict.error
                cause = "" if error is None else "".join(traceback.format_exception(error))
                _write(mask_credentials(f"{cause}{traceback.format_exc()}The watchdog of rank {self._rank} failed.\n"))
                if error is not None:
                    os._exit(1)
                time.sleep(self._limits.heartbeat_timeout / 10)
        try:
            self._leave()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _leave(self) -> None:
        """Tell the other ranks that this one has finished; the host of the store waits until they have too."""
        deadline = time.monotonic() + _SECONDS_TO_END
        while self._store is not None and time.monotonic() < deadline:
            self._set_timer()
            with suppress(*_FAILURES):
                self._store.exchange(self._heartbeat())
                if not self._store.is_hosted_here or all(beat.done for beat in self._store.beats.values()):
                    break
            time.sleep(_INTERVAL / 5)

    def _look(self) -> None:
        received = signals.receive(_INTERVAL)
        mine = self._heartbeat()
        if self._store is not None:
            self._store.exchange(mine)
            if self._store.status is not None:  # after the rank that reported: torchrun names the first that ends
                self._set_timer()
                time.sleep(2 * _LINGER if self._store.status < _SIGNALLED else 0)
                self._exit(self._store.status)
            if self._store.lost:
                self._report(fault_report.lost(self._store.lost, self._store.beats))
        for name in received:  # after lost ranks, for which the launcher signals the others
            self._handle(name)
        for beat in self._others():
            if beat.signal is not None:
                signals.request(beat.signal)
        failing = self._where.failing
        if failing is not None and time.monotonic() - failing[1] > _SECONDS_TO_CLOSE and self._verdict is None:
            self._verdict = self._raised(failing[0])  # trackers that cannot be closed would hide it
        if self._verdict is not None and time.monotonic() >= self._verdict.due:
            self._end(self._verdict.text, self._verdict.status)
        if mine.done:
            return
        if self._store is not None and self._store.error is not None:
            owner = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
            what = f"{owner}, which hosts the store of the ranks, is gone or out of reach ({self._store.error})"
            self._report(Fault(what, [mine], "what ended it, on its host"))
        if self._is_stalled(mine):
            self._report(fault_report.stalled(mine))

    def _heartbeat(self) -> Heartbeat:
        idle = time.monotonic() - self._where.last_progress
        place = (self._rank, self._where.phase, self._where.step, idle)
        return Heartbeat(*place, fault_report.host_memory(), signals.requested(), self._leaving.is_set())

    def _others(self) -> list[Heartbeat]:
        return [] if self._store is None else list(self._store.beats.values())

    def _is_stalled(self, mine: Heartbeat) -> bool:
        """Whether this rank makes no progress, and does not merely wait for one that may still make some."""
        limit = self._limits.stall_timeout
        if limit > 0 and mine.phase == "loading":  # large models load long, without progress
            limit = max(limit, RunConfig.stall_timeout)
        if not 0 < limit < mine.idle:
            return False
        deadlock = all(beat.idle > limit + _SECONDS_TO_END for beat in self._others())
        return deadlock or not fault_report.waits_for_other_ranks()

    def _handle(self, name: str) -> None:
        """A signal to this process. The heartbeat tells the other ranks."""
        first, self._signal = self._signal, self._signal or (name, time.monotonic())
        if first is None and self.saves_on_signal:
            signals.request(name)
            if self._store is None or self._store.claim("signal"):
                _write(f"{name}: saving a checkpoint, then exiting; a second signal exits at once\n")
        elif first is None or time.monotonic() - first[1] > (_ECHO if "RANK" in os.environ else 0):
            how = "ended" if first is None else "a second signal, ended at once"
            self._end(lambda: f"{name}: {how} in phase {self._where.phase}\n", _SIGNALLED + signal.Signals[name])

    def _raised(self, error: BaseException) -> _Verdict:
        """A report of ``error``; if it is a broken connection, after the time in which the cause becomes known."""
        wait = self._limits.heartbeat_timeout + _LINGER if fault_report.is_broken_connection(error) else 0

        def text() -> str:
            fault = fault_report.raised(error, self._heartbeat(), self._options, self.explain_memory)
            return fault.render(self._others(), self._resume)

        return _Verdict(text, 1, time.monotonic() + (wait if self._store else 0), error)

    def _report(self, fault: Fault) -> NoReturn:
        failed = {beat.rank for beat in fault.where}
        others = [beat for beat in [*self._others(), self._heartbeat()] if beat.rank not in failed]
        self._end(lambda: fault.render(sorted(others, key=lambda beat: beat.rank), self._resume), 1)

    def _end(self, text: Callable[[], str], status: int) -> NoReturn:
        """Report, unless another rank does, and end the run."""
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=2)  # if stderr or stdout is blocked, say
        if self._store is None or self._store.claim("report"):
            _write(text())
            if self._store is not None:
                self._store.end_all(status)
                time.sleep(_LINGER)
        else:
            time.sleep(2 * _LINGER)
        self._exit(status)

    def _exit(self, status: int) -> NoReturn:
        """End the process whatever its threads do: a collective that waits, a reward function that sleeps."""
        if self._store is not None:
            self._store.kill_lost()
        os._exit(status)


def _call(look: Callable[[], None]) -> None:
    look()


def _write(text: str) -> None:
    """Write to stderr in one piece, and flush what Python has buffered."""
    with suppress(OSError):  # nobody reads it
        os.write(2, text.encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
