"""Watchdog thread of each rank: sends heartbeats, checks those of the others, and ends a failed run."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, NoReturn

import psutil

from openppo.config import RunConfig
from openppo.process_groups import process_groups
from openppo.strategy import fault_report, signals
from openppo.strategy.fault_report import ExplainMemory, Fault
from openppo.strategy.heartbeats import Heartbeat, HeartbeatStore, collectives_started
from openppo.strategy.launcher_summary import record_cause

_INTERVAL = 0.5
"""Seconds between two heartbeats."""
_LINGER = 3 * _INTERVAL
"""Seconds until all ranks know the exit status; after that the store may close."""
_SIGNALLED = 128
"""Exit status of a process that a signal ended, minus the signal's number, as in shells."""
_ECHO = 2.0
"""Seconds within which two signals count as one: launchers pass on what Slurm and Ctrl-C send to all processes."""


class Watchdog:
    """Context manager around all work of a command, on its main thread.

    If a rank raises, vanishes or stalls, all ranks end within ``heartbeat_timeout`` and a few seconds, with exit status
    1 and one report on stderr that names rank, phase and step. Signals are as in ``openppo.strategy.signals``.
    ``where`` is ``openppo.tracking.phase.current``, and ``options`` holds the command's options by name.
    ``how_to_resume`` returns the report's line on how to continue; it is empty while there is no checkpoint.
    """

    def __init__(
        self,
        limits: RunConfig,
        where: Any,
        options: Mapping[str, Any],
        how_to_resume: Callable[[], str] = str,
    ) -> None:
        self._explain_memory: ExplainMemory = fault_report.explain_nothing
        self._saves_on_signal = False
        self._status: int | None = None

        self._limits = limits
        self._where = where
        self._options = options
        self._how_to_resume = how_to_resume

        self._store = HeartbeatStore(limits.heartbeat_timeout)
        self._signalled_at: float | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        signals.install()
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # a crash in C leaves the Python stacks on stderr
        self._set_timer()
        self._where.progress()  # idle time starts here, not when the program was loaded
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_exit = isinstance(error, SystemExit) and (self._store.n_ranks == 1 or not error.code)
        if error is not None and not is_exit:
            self._fail(error)

        self._ending.set()
        signals.wake()
        self._thread.join()
        self._announce_end()
        faulthandler.cancel_dump_traceback_later()
        signals.uninstall()

    def explain_memory_with(self, explain: ExplainMemory) -> None:
        """Report an out-of-memory error with the memory of each model, as ``explain`` returns it."""
        self._explain_memory = explain

    def save_on_signal(self) -> None:
        """Leave the first signal to the work, which polls ``signals.requested()`` from now on."""
        self._saves_on_signal = True

    def end_on_signal(self) -> None:
        """End the work at the first signal, as before ``save_on_signal``."""
        self._saves_on_signal = False

    def refuse(self, message: str) -> NoReturn:
        """Report a mistake of the user and exit with status 2; all ranks print one line together."""
        if self._store.n_ranks == 1:
            record_cause(message)
            _write(f"error: {message}\n")
            sys.exit(2)
        is_one_host = all(map(self._store.is_here, self._store.beats.values()))
        place = "" if is_one_host else f" on {socket.gethostname()}"
        self._end(f"error{place}: {message}\n", 2, cause=message)

    def _fail(self, error: BaseException) -> NoReturn:
        if self._store.n_ranks > 1 and fault_report.is_broken_connection(error):
            # Meanwhile the watchdogs find the rank that broke the connection, report it, and end this process.
            time.sleep(self._limits.heartbeat_timeout + _LINGER)
        where = self._heartbeat()
        self._report(fault_report.raised(error, where, self._options, explain=self._explain_memory))

    def _announce_end(self) -> None:
        """Tell the other ranks that this one has finished."""
        self._status = 0
        self._store.exchange(self._heartbeat())
        if self._store.is_hosted_here:
            time.sleep(_LINGER)

    def _set_timer(self) -> None:
        """Arm a C timer, which ends the process when the GIL is held, or the store or stderr blocks."""
        faulthandler.dump_traceback_later(0.9 * self._limits.heartbeat_timeout, exit=True, file=2)

    def _run(self) -> None:
        """Run checks until the work has ended.

        An unexpected error ends this thread with its traceback; the timer then ends the run.
        """
        while not self._ending.is_set():
            try:
                # The timer can only print stacks, so the check runs in a frame whose file name is the position.
                code = _call.__code__.replace(co_filename=f"OpenPPO {self._heartbeat()}")
                FunctionType(code, {})(self._check)
            except (OSError, psutil.Error):  # out of file descriptors, for example
                traceback.print_exc()
                time.sleep(self._limits.heartbeat_timeout / 10)
            else:
                if not self._ending.is_set():
                    self._set_timer()

    def _check(self) -> None:
        """Exchange heartbeats, pass on signals, and end the run if a rank has failed."""
        received = signals.receive(_INTERVAL)
        heartbeat = self._heartbeat()
        store = self._store
        had_error = store.error is not None
        store.exchange(heartbeat)

        for beat in store.beats.values():
            if beat.status:
                # Exit after the rank that reported: torchrun names the first rank that exits.
                time.sleep(2 * _LINGER)
                self._exit(beat.status)

        if store.lost:
            self._report(fault_report.lost(store.lost, store.beats))

        # Lost ranks come first, since the launcher signals all others because of them.
        for name in received:
            self._handle(name)
        for beat in store.beats.values():
            if beat.signal is not None:
                signals.request(beat.signal)

        # A rank that hosts the store closes it before its process is gone, so this waits for a second look.
        all_run = all(beat.status is None for beat in store.beats.values())
        if had_error and store.error is not None and all_run:
            self._report(fault_report.without_store(store.error, heartbeat))
        if self._is_stalled(heartbeat):
            faulthandler.dump_traceback(2)
            self._report(fault_report.stalled(heartbeat))

    def _heartbeat(self) -> Heartbeat:
        rank = self._store.rank
        return Heartbeat(
            rank=rank,
            phase=self._where.phase,
            step=self._where.step,
            idle=time.monotonic() - self._where.last_progress,
            memory=fault_report.host_memory(),
            signal=signals.requested(),
            status=self._status,
            samples=rank >= self._store.n_ranks - self._options.get("rollout_ranks", 0),
            collectives=collectives_started(),
            launcher=self._store.launcher,
        )

    def _is_stalled(self, heartbeat: Heartbeat) -> bool:
        """True if this rank makes no progress, and waits for no other rank."""
        limit = self._limits.stall_timeout
        if limit > 0 and heartbeat.phase == "loading":
            limit = max(limit, RunConfig.stall_timeout)  # large models take long to load
        if not 0 < limit < heartbeat.idle:
            return False
        return not any(heartbeat.waits_for(beat) for beat in self._store.beats.values())

    def _handle(self, name: str) -> None:
        """Handle a signal to this process; the heartbeat passes it on to the other ranks."""
        now = time.monotonic()
        first = self._signalled_at
        if first is None and self._saves_on_signal:
            self._signalled_at = now
            signals.request(name)
            if self._store.claim("signal"):
                _write(
                    f"{name}: saving a checkpoint, then exiting; a second signal exits at once\n"
                )
        elif first is None or now - first > _ECHO:
            reaction = "ended" if first is None else "a second signal, ended at once"
            ending = f"{name}: {reaction} in phase {self._where.phase}"
            self._end(f"{ending}\n", _SIGNALLED + signal.Signals[name], cause=ending)

    def _report(self, fault: Fault) -> NoReturn:
        beats = [*self._store.beats.values(), self._heartbeat()]
        self._end(fault.render(beats, self._how_to_resume()), 1, cause=fault.message)

    def _end(self, text: str, status: int, cause: str) -> NoReturn:
        """Print ``text``, unless another rank has a report, and end the run.

        torchrun's summary repeats the ``cause``.
        """
        self._ending.set()
        claimed = self._store.claim("report")
        if claimed:
            record_cause(cause)
            _write(text)
            self._status = status
            self._store.exchange(self._heartbeat())

        if self._store.n_ranks > 1:
            time.sleep(_LINGER if claimed else 2 * _LINGER)
        self._exit(status)

    def _exit(self, status: int) -> NoReturn:
        """End the process even if threads still run, such as a waiting collective or a sleeping reward function."""
        self._store.kill_lost()
        process_groups.kill_all()
        os._exit(status)


def _call(check: Callable[[], None]) -> None:
    check()


def _write(text: str) -> None:
    """Write to stderr in one piece, and flush Python's buffers."""
    with suppress(OSError):  # stderr is closed
        os.write(2, text.encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
