"""What the ranks of a run know of each other while they compute: signs of life in the launcher's store."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore

SILENT = "no sign of life"
STACKS_SIGNAL = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2  # macOS has no SIGRTMIN
"""A process that gets it writes the stacks of its threads into ``Beat.stacks``, whatever holds Python's lock."""
_STORE_TIMEOUT = 10.0
"""Seconds to wait for the store, or 0.8 of the silence that is allowed: a launcher that was stopped may go on."""
T = TypeVar("T")


class StoreLostError(Exception):
    """The store does not answer: its host, or the process that hosts it, is gone."""


@cache
def this_machine() -> str | None:
    """Kernel and PID namespace, within which process ids mean something; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: a rank that vanishes is noticed by its silence
        return None


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself, again and again."""

    rank: int
    phase: str = "starting"
    step: int = 0
    phases: int = 0
    """Phases begun and ended; fewer than others have: this rank is behind."""
    idle: float = 0.0
    """Seconds without progress."""
    waits: bool = False
    """Without progress it is inside a collective, and so waits for another rank."""
    memory: str = ""
    """Of the process and its machine, in words."""
    count: int = 0
    done: bool = False
    """The rank has ended its work and may leave."""
    host: str = socket.gethostname()
    machine: str | None = None
    """As ``this_machine`` says there."""
    pid: int = 0
    stacks: str = ""
    """File on its host into which a crash writes the Python stacks, and ``STACKS_SIGNAL``."""

    @property
    def is_here(self) -> bool:
        """Whether the process id means something in this process."""
        return self.machine is not None and self.machine == this_machine()


def process_lives(pid: int) -> bool:
    """Whether a process of this machine still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no file can be opened just now: what it is silent about will tell
        return True
    return state not in "ZX"


class Peers:
    """The other ranks, seen from one thread of this rank, which alone may use the object."""

    def __init__(self, rank: int, world_size: int, silence: float) -> None:
        self.rank = rank
        self.others = [other for other in range(world_size) if other != rank]
        self.silence = silence
        self.beats: dict[int, Beat] = {}
        self.signal: str | None = None
        """Name of the signal that a rank got."""
        self.ended: int | None = None
        """Exit status of a run that ends, once somebody has said why."""
        self._heard: dict[int, float] = {}  # when the beat of a rank last changed, on our clock
        self._store: TCPStore | None = None
        self._patience = max(_STORE_TIMEOUT, 0.8 * silence)
        self._asking = ThreadPoolExecutor(1, "store")
        self._answer: Future[Any] | None = None
        # The keys of a restarted run are others, where torchrun keeps the store: on one host (see strategy/comm.py).
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
        self._prefix = f"openppo/{restart}"
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.hosts_store = rank == 0 and not agent
        """Without torchrun's agent, the store lives and ends with rank 0."""

    def tell(self, mine: Beat) -> bool:
        """Say it to the others; False while there is no store yet. ``StoreLostError`` if it does not answer."""
        return self._ask(lambda: self._tell(mine))

    def exchange(self, mine: Beat) -> None:
        """Say it to the others, and hear what they say. Errors as in ``tell``."""
        self._ask(lambda: self._exchange(mine))

    def missing(self) -> list[int]:
        """Ranks that have not said anything yet."""
        return [rank for rank in self.others if rank not in self.beats]

    def lost(self, now: float) -> dict[int, str]:
        """Ranks that cannot end well any more, and what of them is known.

        ``now`` is of before the last ``exchange``: had this process been stopped since, it would find all ranks silent.
        """
        found = {}
        for rank, beat in self.beats.items():
            silent = now - self._heard[rank]
            if beat.done:
                continue
            if beat.is_here and not process_lives(beat.pid):
                if not self._last_words(rank).done:
                    found[rank] = "its process has ended"
            elif silent > self.silence:
                found[rank] = f"{SILENT} for {silent:.0f} s (--heartbeat_timeout)"
        return found

    def kill(self, ranks: Sequence[int]) -> None:
        """End processes of this machine that give no sign of life: a launcher would wait for them. Their stacks go."""
        for beat in (self.beats[rank] for rank in ranks):
            if beat.is_here:
                with contextlib.suppress(ProcessLookupError):  # another rank was faster
                    os.kill(beat.pid, signal.SIGKILL)
                if beat.stacks:
                    Path(beat.stacks).unlink(missing_ok=True)

    def start_clocks_again(self) -> None:
        """Forget how long ranks have been silent: this process was stopped itself."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def alone_on_machine(self) -> bool:
        """Whether no other rank could end the process of this one."""
        return not any(beat.is_here for beat in self.beats.values())

    def tell_signal(self, name: str) -> None:
        """All ranks shall know of the signal that this one got."""
        self._set("signal", name)

    def may_speak(self) -> bool:
        """True on one rank only, the first that asks: it says why the run ends."""
        try:
            store = self._store
            return store is None or self._ask(lambda: store.add(self._key("speaker"), 1)) == 1
        except StoreLostError:
            return self.speaks_without_store()

    def tell_end(self, status: int) -> None:
        """Everything is said: all ranks shall end with this exit status."""
        self._set("end", str(status))

    def speaks_without_store(self) -> bool:
        """True on the first living rank of each machine."""
        here = [rank for rank, beat in self.beats.items() if beat.is_here and process_lives(beat.pid)]
        return self.rank < min(here, default=self.rank + 1)

    def _ask(self, question: Callable[[], T]) -> T:
        """On a thread of its own: torch waits without end for a store whose host is silent, whatever its time-outs."""
        if self._answer is not None and not self._answer.done():
            raise StoreLostError("it has not answered before")
        answer = self._answer = self._asking.submit(question)
        try:
            return answer.result(self._patience)
        except TimeoutError as error:
            raise StoreLostError(f"no answer within {self._patience:.0f} s") from error
        except RuntimeError as error:  # of torch's store, in several classes
            raise StoreLostError(str(error).splitlines()[0]) from error

    def _tell(self, mine: Beat) -> bool:
        if self._store is None and not self._connect():
            return False
        assert self._store is not None
        self._store.set(self._key(self.rank), json.dumps(dataclasses.asdict(mine)))
        return True

    def _exchange(self, mine: Beat) -> None:
        if not self._tell(mine):
            return
        assert self._store is not None
        for rank in self.others:
            if rank in self.beats or self._store.check([self._key(rank)]):
                self._hear(Beat(**json.loads(self._store.get(self._key(rank)))))
        if self.signal is None and self._store.check([self._key("signal")]):
            self.signal = self._store.get(self._key("signal")).decode()
        if self.ended is None and self._store.check([self._key("end")]):
            self.ended = int(self._store.get(self._key("end")))

    def _last_words(self, rank: int) -> Beat:
        """Of a rank whose process has ended: it may have said that it is done since it was heard, and then ended."""
        with contextlib.suppress(StoreLostError):  # the store went with it: what is known counts
            store = self._store
            if store is not None:
                self._ask(lambda: self._hear(Beat(**json.loads(store.get(self._key(rank))))))
        return self.beats[rank]

    def _connect(self) -> bool:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if not self.hosts_store:  # torch would wait, and complain loudly, while there is nothing to connect to
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                return False
        patience = timedelta(seconds=self._patience)
        self._store = TCPStore(
            host, port, is_master=self.hosts_store, timeout=patience, wait_for_workers=False, multi_tenant=True
        )
        return True

    def _hear(self, beat: Beat) -> None:
        if beat.rank not in self.beats or self.beats[beat.rank].count != beat.count:
            self._heard[beat.rank] = time.monotonic()
        self.beats[beat.rank] = beat

    def _set(self, name: str, value: str) -> None:
        store = self._store
        if store is not None:
            self._ask(lambda: store.set(self._key(name), value))

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"
