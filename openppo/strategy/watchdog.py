"""The watchdog: a thread of each rank that sends heartbeats, checks those of the others, and ends a failed run.

Heartbeats go through the launcher's store, while the ranks compute.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from types import FunctionType
from typing import Any, NoReturn

import psutil
from torch.distributed import TCPStore

from openppo.config import RunConfig
from openppo.process_groups import process_groups
from openppo.strategy import fault_report, signals
from openppo.strategy.fault_report import ExplainMemory, Fault, Heartbeat, MemoryView, this_machine
from openppo.strategy.launcher_summary import record_cause

_INTERVAL = 0.5
_LINGER = 3 * _INTERVAL
"""Seconds until all ranks know the exit status; then the store may go."""
_SECONDS_FOR_RANK_0 = 10.0
"""To find the same mistake of the user, which is then reported by rank 0 alone."""
_SECONDS_TO_END = 10.0
_SIGNALLED = (
    128  # exit status of a process ended by a signal, less the signal's number, as in shells
)
_ECHO = 2.0
"""Seconds within which two signals count as one: launchers pass on what Slurm and Ctrl-C send to all processes."""


class HeartbeatStore:
    """Heartbeats of all ranks, through a client of the launcher's store that nothing else uses; idle with one rank.

    A client is locked during a blocking wait, so the training thread's could not carry heartbeats.
    """

    def __init__(self, rank: int, world_size: int, limit: float) -> None:
        self.beats: dict[int, Heartbeat] = {}  # the newest of each other rank
        self.lost: dict[int, str] = {}  # ranks that cannot finish, and why
        self.status: int | None = None  # for all ranks to exit with, once the reason is reported
        self.error: str | None = None  # why the store does not answer
        self._rank, self._limit = rank, limit
        self._others = [other for other in range(world_size) if other != rank]
        self._heard: dict[int, float] = {}
        self._store: TCPStore | None = None
        # torchrun's store outlives a restart of the ranks, so each start has keys of its own (see comm.py).
        restart = (
            os.environ.get("TORCHELASTIC_RESTART_COUNT")
            if os.environ.get("GROUP_WORLD_SIZE") == "1"
            else "0"
        )
        self._prefix = f"openppo/{restart}"
        # Without torchrun's agent, rank 0 hosts the store.
        self.is_hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def exchange(self, mine: Heartbeat) -> None:
        """Publish a heartbeat and read those of the other ranks."""
        if not self._others:
            return
        ended = self._ended()  # their heartbeats in the store are final
        try:
            self._store = self._store or self._connect()
            if self._store is not None:
                self._send_and_receive(self._store, mine)
        except RuntimeError as error:  # of torch's store, in several classes
            self.error = str(error).splitlines()[0]
            time.sleep(
                1
            )  # a rank that hosts the store closes it some time before its process is gone
            ended = self._ended()
        for rank in (rank for rank, beat in self.beats.items() if not beat.done):
            silent = time.monotonic() - self._heard[rank]
            if silent > (0.8 if rank in ended else 1) * self._limit:  # its timer ends it at 0.9
                self.lost[rank] = f"no heartbeat for {silent:.0f} s (--heartbeat_timeout)"
            elif rank in ended:
                self.lost[rank] = "its process has ended"

    def _ended(self) -> list[int]:
        return [rank for rank, beat in self.beats.items() if beat.has_ended()]

    def claim(self, what: str) -> bool:
        """True on the first rank that asks; without a store, on the first living rank of each machine."""
        with suppress(RuntimeError):
            return self._store is None or self._store.add(f"{self._prefix}/{what}", 1) == 1
        here = [
            beat
            for beat in self.beats.values()
            if beat.machine == this_machine() and not beat.has_ended()
        ]
        return all(self._rank < beat.rank for beat in here)

    def end_all(self, status: int) -> None:
        """Make all ranks exit with this status."""
        with suppress(RuntimeError):  # without a store nobody is left to know
            if self._store is not None:
                self._store.set(f"{self._prefix}/status", str(status))

    def kill_lost(self) -> None:
        """Kill lost ranks of this machine, which the launcher would wait for."""
        for beat in (self.beats[rank] for rank in self.lost):
            with suppress(ProcessLookupError):
                if beat.machine == this_machine():
                    os.kill(beat.pid, signal.SIGKILL)

    def _connect(self) -> TCPStore | None:
        """The store, once it is there: torch's client would wait for it, and warn on stderr."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not self.is_hosted_here:
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                return None
        return TCPStore(
            host, port, None, self.is_hosted_here, wait_for_workers=False, multi_tenant=True
        )

    def _send_and_receive(self, store: TCPStore, mine: Heartbeat) -> None:
        store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(mine)))
        for rank in self._others:
            if store.check([key := f"{self._prefix}/{rank}"]):
                beat = Heartbeat(**json.loads(store.get(key)))
                if beat != self.beats.get(rank):
                    self.beats[rank], self._heard[rank] = beat, time.monotonic()
        if store.check([key := f"{self._prefix}/status"]):
            self.status = int(store.get(key))


class Watchdog:
    """Around all work of a command, on its main thread: ``with Watchdog(...) as watchdog: ...``.

    If a rank raises, vanishes or stalls, all ranks end within ``heartbeat_timeout`` and a few seconds, with exit status
    1 and one report on stderr that names rank, phase and step. Signals are as in ``openppo.strategy.signals``.
    ``where`` is ``openppo.tracking.phase.current``, ``options`` are those of the command by name. ``how_to_resume``
    gives the line of a report that tells how to continue, empty while there is no checkpoint.
    """

    def __init__(
        self,
        limits: RunConfig,
        where: Any,
        options: Mapping[str, Any],
        how_to_resume: Callable[[], str] = str,
    ) -> None:
        self.explain_memory: ExplainMemory = lambda phase: MemoryView()
        """For a report of an out-of-memory error: what each model takes."""
        self.saves_on_signal = False
        """Whether the work under way polls ``signals.requested()``; other work ends at the first signal."""
        self._limits = limits
        self._where = where
        self._options = options
        self._how_to_resume = how_to_resume
        self._rank, self._n_ranks = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        self._samples = self._rank >= self._n_ranks - options.get("rollout_ranks", 0)
        self._store = HeartbeatStore(self._rank, self._n_ranks, limits.heartbeat_timeout)
        self._signalled_at: float | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        signals.install()
        if not faulthandler.is_enabled():
            faulthandler.enable(2)  # a crash in C leaves the Python stacks on stderr
        self._set_timer()
        self._where.progress()  # not since this program was loaded
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not (
            isinstance(error, SystemExit) and (self._n_ranks == 1 or not error.code)
        ):
            if self._n_ranks > 1 and fault_report.is_broken_connection(error):
                time.sleep(
                    self._limits.heartbeat_timeout + _LINGER
                )  # until the cause is known, and ends the process
            self._report(
                fault_report.raised(
                    error, self._heartbeat(), self._options, explain=self.explain_memory
                )
            )
        self._ending.set()
        signals.wake()
        self._thread.join()
        deadline = time.monotonic() + _SECONDS_TO_END
        while (
            time.monotonic() < deadline
        ):  # the others learn that this rank has finished; the store outlives them
            self._store.exchange(self._heartbeat(done=True))
            if not self._store.is_hosted_here or all(
                beat.done for beat in self._store.beats.values()
            ):
                break
            time.sleep(_INTERVAL / 5)
        faulthandler.cancel_dump_traceback_later()
        signals.uninstall()

    def refuse(self, message: str) -> NoReturn:
        """Report a mistake of the user, found before training: one line on stderr for all ranks, exit status 2."""
        if self._n_ranks == 1:
            record_cause(message)
            _write(f"error: {message}\n")
            sys.exit(2)
        if self._rank:
            time.sleep(_SECONDS_FOR_RANK_0)
        self._end(
            f"error{f' on rank {self._rank}' if self._rank else ''}: {message}\n", 2, cause=message
        )

    def _set_timer(self) -> None:
        """End the process, from C, if no look succeeds in time: a thread holds the GIL, or the store is silent."""
        faulthandler.dump_traceback_later(0.9 * self._limits.heartbeat_timeout, exit=True, file=2)

    def _run(self) -> None:
        """Look until the end. An unexpected error ends this thread, with its traceback, and by the timer the run."""
        while not self._ending.is_set():
            try:  # in a frame whose file name is the position, since the timer prints the stacks alone
                code = _call.__code__.replace(co_filename=f"OpenPPO {self._heartbeat()}")
                FunctionType(code, {})(self._look)
            except (OSError, psutil.Error):  # no file to be had, say
                traceback.print_exc()
                time.sleep(self._limits.heartbeat_timeout / 10)
            else:
                if not self._ending.is_set():
                    self._set_timer()

    def _look(self) -> None:
        received = signals.receive(_INTERVAL)
        mine, store = self._heartbeat(), self._store
        store.exchange(mine)
        if (
            store.status is not None
        ):  # after the rank that reported: torchrun names the first that ends
            time.sleep(2 * _LINGER if store.status < _SIGNALLED else 0)
            self._exit(store.status)
        if store.lost:
            self._report(fault_report.lost(store.lost, store.beats))
        for name in received:  # after lost ranks, for which the launcher signals the others
            self._handle(name)
        for beat in store.beats.values():
            if beat.signal is not None:
                signals.request(beat.signal)
        if store.error is not None:
            owner = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
            what = f"{owner}, which hosts the store of the ranks, is gone or out of reach ({store.error})"
            self._report(Fault(what, [mine], "what ended it, on its host"))
        if self._is_stalled(mine):
            self._report(fault_report.stalled(mine))

    def _heartbeat(self, done: bool = False) -> Heartbeat:
        place = (
            self._rank,
            self._where.phase,
            self._where.step,
            time.monotonic() - self._where.last_progress,
        )
        state = fault_report.host_memory(), signals.requested(), done, self._samples
        return Heartbeat(*place, *state, fault_report.collectives_started())

    def _is_stalled(self, mine: Heartbeat) -> bool:
        """Whether this rank makes no progress, and does not merely wait for one that may still make some."""
        if self._limits.stall_timeout <= 0 or mine.idle <= self._stall_limit(mine):
            return False
        others = self._store.beats.values()
        if all(
            beat.idle > self._stall_limit(beat) + _SECONDS_TO_END for beat in others
        ):  # a deadlock
            return True
        return not (any(map(mine.waits_for, others)) or fault_report.waits_for_other_ranks())

    def _stall_limit(self, beat: Heartbeat) -> float:
        """Seconds that a rank may be without progress: large models load long."""
        limit = self._limits.stall_timeout
        return max(limit, RunConfig.stall_timeout) if beat.phase == "loading" else limit

    def _handle(self, name: str) -> None:
        """A signal to this process. The heartbeat tells the other ranks."""
        now, first = time.monotonic(), self._signalled_at
        if first is None and self.saves_on_signal:
            self._signalled_at = now
            signals.request(name)
            if self._store.claim("signal"):
                _write(
                    f"{name}: saving a checkpoint, then exiting; a second signal exits at once\n"
                )
        elif first is None or now - first > _ECHO:
            how = "ended" if first is None else "a second signal, ended at once"
            ending = f"{name}: {how} in phase {self._where.phase}"
            self._end(f"{ending}\n", _SIGNALLED + signal.Signals[name], cause=ending)

    def _report(self, fault: Fault) -> NoReturn:
        failed = {beat.rank for beat in fault.where}
        others = [
            beat
            for beat in [*self._store.beats.values(), self._heartbeat()]
            if beat.rank not in failed
        ]
        text = fault.render(sorted(others, key=lambda beat: beat.rank), self._how_to_resume())
        self._end(text, 1, cause=fault.what)

    def _end(self, text: str, status: int, cause: str) -> NoReturn:
        """Report, unless another rank does, and end the run; torchrun's summary repeats the ``cause``."""
        self._ending.set()
        faulthandler.dump_traceback_later(
            _SECONDS_TO_END, exit=True, file=2
        )  # if stderr or stdout is blocked, say
        claimed = self._store.claim("report")
        if claimed:
            record_cause(cause)
            _write(text)
            self._store.end_all(status)
        if self._n_ranks > 1:
            time.sleep(_LINGER if claimed else 2 * _LINGER)
        self._exit(status)

    def _exit(self, status: int) -> NoReturn:
        """End the process whatever its threads do: a collective that waits, a reward function that sleeps."""
        self._store.kill_lost()
        process_groups.kill_all()
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
