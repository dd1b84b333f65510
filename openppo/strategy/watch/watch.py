"""A thread beside the one that trains: it watches the other ranks, takes signals, and ends a run that cannot go on."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, TextIO

from openppo.config import RunConfig, mask_credentials
from openppo.strategy import interrupt
from openppo.strategy.watch import faults
from openppo.strategy.watch.faults import Fault
from openppo.strategy.watch.out_of_memory import host_memory
from openppo.strategy.watch.peers import STACKS_SIGNAL, Beat, Peers, StoreLostError, this_machine
from openppo.strategy.watch.report import render
from openppo.strategy.watch.stacks import in_collective

logger = logging.getLogger("openppo")

_INTERVAL = 0.5
_LINGER = 3 * _INTERVAL
"""Until all ranks know what a rank said before it ended; with it the store may go."""
_SECONDS_FOR_THE_LAUNCHER = 5
"""To end the other ranks of a failed one; torchrun names the first that ends as the cause."""
_SECONDS_FOR_RANK_0 = 20
"""To find the same mistake of the user, which then is no matter of one rank."""
_SECONDS_TO_SPEAK = 10
_SECONDS_TO_CLOSE = 20
"""For logs to be closed after what ended the run was raised: a report to be written, a service to answer."""
_SIGNALLED = 128
"""Exit status of a process that a signal ended, less the signal's number, as shells have it."""
_ECHO = 2.0
"""Launchers pass signals on: of one signal to all processes (Slurm, Ctrl-C) a rank sees two, with little between."""


_SECONDS_FOR_NEIGHBOURS = 2.0
"""For a rank beside the lost one to speak first: it can read the stacks that the lost one leaves."""
_STUMBLES = 60


class Where(Protocol):
    """The position of the thread that trains (``openppo.tracking.phase``)."""

    phase: str
    step: int
    phases: int
    ticks: int
    failing: tuple[BaseException, float] | None


class Watch:
    """Around all work of a command: ``with Watch(...) as watch: ...``. Opened on the main thread.

    When a rank raises, vanishes, or makes no progress, all ranks end within ``heartbeat_timeout`` and a few seconds,
    whatever their main threads do, with exit status 1 and one report on stderr. Out of memory, it has the lines of
    ``explain_memory`` too: what each model takes. Signals are as in ``openppo.strategy.interrupt``.

    ``options`` are those of the command by name; ``resume`` says how to go on after a failure.
    """

    def __init__(self, limits: RunConfig, where: Where, options: Mapping[str, Any], resume: str = "") -> None:
        self.explain_memory: Callable[[], Sequence[str]] = list
        self._limits = limits
        self._where = where
        self._options = options
        self._resume = resume
        self._rank, world_size = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        self._peers = Peers(self._rank, world_size, limits.heartbeat_timeout) if world_size > 1 else None
        self._launched = "RANK" in os.environ
        self._count = 0
        self._progress = (where.ticks, time.monotonic())
        self._looked = time.monotonic()
        self._failure: tuple[BaseException, float] | None = None
        self._refusal: tuple[str, float] | None = None
        self._signal: tuple[str, float] | None = None
        self._announced = False
        self._stumbled = 0
        self._reports = False
        self._lost: Sequence[int] = ()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._pipe = interrupt.SignalPipe()
        self._crash_file, self._stacks = tempfile.mkstemp(prefix="openppo_stacks_") if self._peers else (2, "")
        if not faulthandler.is_enabled():
            faulthandler.enable(self._crash_file)
        if self._stacks:
            faulthandler.register(STACKS_SIGNAL, self._crash_file)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and (self._peers is None or not error.code)):
            self._leaving.set()
        else:
            self._failure = (error, time.monotonic())
        self._pipe.wake()
        self._thread.join()  # after an error it ends the process
        self._pipe.close()
        if self._stacks:
            faulthandler.unregister(STACKS_SIGNAL)
            faulthandler.disable()
            os.close(self._crash_file)
            Path(self._stacks).unlink(missing_ok=True)  # in a run of weeks /tmp may have been cleaned

    def refuse(self, message: str) -> NoReturn:
        """A mistake of the user, found before training: one line on stderr for all ranks, and exit status 2."""
        if self._peers is None:
            _write(f"error: {message}\n")
            sys.exit(2)
        self._refusal = (message, time.monotonic())
        self._pipe.wake()
        self._thread.join()
        raise AssertionError("the watch ends the process")

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                try:
                    self._take(self._pipe.wait(_INTERVAL))
                    self._look()
                    self._stumbled = 0
                except (OSError, RuntimeError, MemoryError) as error:
                    self._stumble(error)
            self._take_leave()
        except StoreLostError as error:
            if not self._leaving.is_set():  # a store may end before a run that ended well
                self._end_without_store(error)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _stumble(self, error: Exception) -> None:
        """A look failed: no file or thread to be had, say. That is no end of the run, but cannot go on for ever."""
        self._stumbled += 1
        text = "".join(traceback.format_exception(error))
        if self._reports:
            failure = "" if self._failure is None else "".join(traceback.format_exception(self._failure[0]))
            _write(f"{mask_credentials(failure)}{text}The watch of rank {self._rank} could not report it.\n")
            self._exit(1)
        if self._stumbled == 1:
            _write(f"{text}The watch of rank {self._rank} could not look; it goes on.\n")
        if self._stumbled == _STUMBLES:
            _write(f"{text}The watch of rank {self._rank} could not look {_STUMBLES} times: it ends the run.\n")
            self._exit(1)
        time.sleep(_INTERVAL)

    def _look(self) -> None:
        now, limit = time.monotonic(), self._limits.heartbeat_timeout
        if now - self._looked > limit / 2:  # this process was stopped: silence and idleness of that time are no fault
            self._progress = (self._progress[0], now)
            if self._peers is not None:
                self._peers.start_clocks_again()
        self._looked = now
        mine = self._beat(now)
        if self._peers is not None:
            # A thread that holds Python's lock stops this one too. Then another rank of this machine has C write our
            # stacks, and ends us; without one a timer does, which also ends a process that was stopped for so long.
            if self._peers.alone_on_machine():
                faulthandler.dump_traceback_later(0.9 * limit, exit=True, file=2)
            else:
                faulthandler.cancel_dump_traceback_later()
            self._peers.exchange(mine)
            if self._peers.ended is not None:
                self._lost = list(self._peers.lost(now))
                self._follow()
        self._look_at_main_thread(now)
        if self._peers is not None:
            if lost := self._peers.lost(now):
                self._lost = list(lost)
                if not any(self._peers.beats[rank].is_here for rank in lost):
                    self._pipe.wait(_SECONDS_FOR_NEIGHBOURS)
                self._report(faults.lost(lost, self._peers.beats))
            if self._peers.signal is not None:
                interrupt.request(self._peers.signal)
                self._announce(self._peers.signal)
        self._obey_signal()
        if 0 < self._patience() < now - self._progress[1] and self._is_behind():
            beat = self._beat(time.monotonic())
            if beat.idle > self._patience():  # else it has gone on since ``now``
                self._report(faults.stalled(beat))

    def _look_at_main_thread(self, now: float) -> None:
        self._failure = self._failure or _overdue_failure(self._where, now)
        if self._failure is not None:
            error, since = self._failure
            # Of a rank that vanished the others see closed connections, and the cause is known a little later.
            patience = (
                self._limits.heartbeat_timeout + 2 * _INTERVAL if self._peers and faults.is_consequence(error) else 0
            )
            if now - since >= patience:
                self._report(self._raised(error))
        elif self._refusal is not None:
            message, since = self._refusal
            if self._rank == 0 or now - since > _SECONDS_FOR_RANK_0:
                who = "" if self._rank == 0 else f" on rank {self._rank}"
                self._end(lambda: f"error{who}: {message}\n", 2)

    def _take(self, names: Sequence[str]) -> None:
        for name in names:
            now = time.monotonic()
            if self._signal is None:
                self._signal = (name, now)
                interrupt.request(name)
            elif now - self._signal[1] > (_ECHO if self._launched else 0):
                self._end_by_signal(name, f"{name} again: ended at once in phase {self._where.phase}\n")

    def _obey_signal(self) -> None:
        if self._signal is None or self._announced:
            return
        name = self._signal[0]
        if interrupt.is_deferred():
            if self._peers is not None:
                self._peers.tell_signal(name)
            self._announce(name)
            return
        missing = self._peers.missing() if self._peers is not None else []
        not_there = f"; not yet started: rank {', '.join(map(str, missing))}" if missing else ""
        self._end_by_signal(name, f"{name}: ended in phase {self._where.phase}{not_there}\n")

    def _end_by_signal(self, name: str, text: str) -> NoReturn:
        self._end(lambda: text, _status(name))

    def _announce(self, name: str) -> None:
        if not self._announced and self._rank == 0:
            logger.warning("%s: finishing the current micro-batch, then saving; a second signal ends at once", name)
        self._announced = True

    def _beat(self, now: float) -> Beat:
        if self._where.ticks != self._progress[0]:
            self._progress = (self._where.ticks, now)
        self._count += 1
        return Beat(
            rank=self._rank,
            phase=self._where.phase,
            step=self._where.step,
            phases=self._where.phases,
            idle=now - self._progress[1],
            waits=now - self._progress[1] > _LINGER and in_collective(),
            memory=host_memory(),
            count=self._count,
            done=self._leaving.is_set(),
            machine=this_machine(),
            pid=os.getpid(),
            stacks=self._stacks,
        )

    def _patience(self) -> float:
        """Seconds without progress that are no fault; loading shows none, and large models take long."""
        limit = self._limits.stall_timeout
        return max(limit, RunConfig.stall_timeout) if limit > 0 and self._where.phase == "loading" else limit

    def _is_behind(self) -> bool:
        """Whether the others wait for this rank: it is in no collective, or has done less, or stopped first."""
        mine = self._beat(time.monotonic())
        beats = [mine, *(self._peers.beats.values() if self._peers is not None else ())]
        return min(beats, key=lambda beat: (beat.waits, beat.phases, -beat.idle, beat.rank)) is mine

    def _raised(self, error: BaseException) -> Fault:
        self._reports = True
        return faults.raised(error, self._beat(time.monotonic()), self._options, self.explain_memory)

    def _report(self, fault: Fault) -> NoReturn:
        self._reports = True
        others = []
        if self._peers is not None:
            with contextlib.suppress(StoreLostError):  # what is known already will do
                time.sleep(_INTERVAL)  # where the others stopped
                self._peers.exchange(self._beat(time.monotonic()))
            known = {self._rank: self._beat(time.monotonic()), **self._peers.beats}
            failed = {beat.rank for beat in fault.where}
            others = [beat for rank, beat in sorted(known.items()) if rank not in failed]
        self._end(lambda: render(fault, others, self._resume), 1)

    def _end(self, text: Callable[[], str], status: int) -> NoReturn:
        """Say it, unless another rank does, and end this process and by that the run."""
        faulthandler.cancel_dump_traceback_later()
        if self._peers is None:
            _write(text())
        elif self._peers.may_speak():
            _write(text())
            with contextlib.suppress(StoreLostError):  # it is said, and nobody is left to know
                self._peers.tell_end(status)
            time.sleep(_LINGER)
        else:
            deadline = time.monotonic() + _SECONDS_TO_SPEAK
            with contextlib.suppress(StoreLostError):  # the rank that speaks has ended
                while self._peers.ended is None and time.monotonic() < deadline:
                    self._pipe.wait(_INTERVAL)
                    self._peers.exchange(self._beat(time.monotonic()))
            self._follow()
        self._exit(status)

    def _follow(self) -> NoReturn:
        """End as another rank said, and after it."""
        assert self._peers is not None
        faulthandler.cancel_dump_traceback_later()
        status = 1 if self._peers.ended is None else self._peers.ended
        if status < _SIGNALLED:
            self._pipe.wait(_SECONDS_FOR_THE_LAUNCHER)
        self._exit(status)

    def _end_without_store(self, error: StoreLostError) -> NoReturn:
        """The launcher, or rank 0 where that is the host of the store, has ended; or the network."""
        assert self._peers is not None
        status = 1 if self._signal is None else _status(self._signal[0])
        if self._peers.ended is None and self._peers.speaks_without_store():
            host = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            owner = "torchrun" if not self._peers.hosts_store and "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
            what = f"{owner} is gone, or out of reach: its store at {host} does not answer ({error})"
            fault = Fault(what, [self._beat(time.monotonic())], look_at=["what ended it, on that host"])
            if lost := self._peers.lost(self._looked):
                self._lost = list(lost)
                fault = faults.lost(lost, self._peers.beats)
            elif self._failure is not None and not faults.is_consequence(self._failure[0]):
                fault = self._raised(self._failure[0])
            if self._signal is None:
                failed = {beat.rank for beat in fault.where}
                others = [beat for rank, beat in self._peers.beats.items() if rank not in failed]
                _write(render(fault, others, self._resume))
            else:
                _write(f"{self._signal[0]}: ended with {owner} in phase {self._where.phase}\n")
        time.sleep(_LINGER)  # a rank that ends now would look like the cause, or leave the word to the next
        self._exit(status)

    def _take_leave(self) -> None:
        """Say that this rank is done; the host of the store stays until all are."""
        if self._peers is None:
            return
        faulthandler.cancel_dump_traceback_later()
        self._peers.tell(self._beat(time.monotonic()))
        deadline = time.monotonic() + _SECONDS_TO_SPEAK
        while self._peers.hosts_store and time.monotonic() < deadline:
            if all(beat.done for beat in self._peers.beats.values()):
                break
            time.sleep(_INTERVAL / 5)
            self._peers.exchange(self._beat(time.monotonic()))

    def _exit(self, status: int) -> NoReturn:
        """End the process whatever its threads do: a collective that waits, a reward function that sleeps."""
        if self._peers is not None:
            self._peers.kill(self._lost)
        if self._stacks:
            Path(self._stacks).unlink(missing_ok=True)
        os._exit(status)


def _overdue_failure(where: Where, now: float) -> tuple[BaseException, float] | None:
    """What was raised too long ago: the other ranks wait, and logs that cannot be closed would hide the cause."""
    failing = where.failing
    return failing if failing is not None and now - failing[1] > _SECONDS_TO_CLOSE else None


def _write(text: str) -> None:
    """To stderr in one piece, after what Python has buffered; a blocked stdout or a dead log must not keep us."""
    for stream in (sys.stdout, sys.stderr):
        flushing = threading.Thread(target=_flush, args=[stream], daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads
            flushing.start()
            flushing.join(timeout=1)
    rest = text.encode(errors="replace")
    with contextlib.suppress(OSError):  # nobody reads any more
        while rest:
            rest = rest[os.write(2, rest) :]


def _flush(stream: TextIO | None) -> None:
    """Flush a stream that may be missing (``>&-``), closed, or read by nobody."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _status(name: str) -> int:
    return _SIGNALLED + signal.Signals[name]
