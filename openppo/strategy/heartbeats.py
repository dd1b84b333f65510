"""Heartbeats of the ranks, exchanged through the launcher's store while the ranks compute."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import psutil
from torch.distributed import TCPStore


@cache
def this_machine() -> str:
    """Kernel and PID namespace, within which process ids are unique."""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@dataclass(frozen=True)
class Heartbeat:
    """Position and state of a rank: ``idle`` seconds without progress, the ``signal`` that asks the run to exit."""

    rank: int
    phase: str
    step: int
    idle: float
    memory: str = ""
    signal: str | None = None
    done: bool = False
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=this_machine)
    pid: int = field(default_factory=os.getpid)

    def has_ended(self) -> bool:
        """Whether the rank's process was on this machine and is gone."""
        try:
            return self.machine == this_machine() and psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        step = f"step {self.step}" if self.step else "before the first step"
        return f"rank {self.rank}{host}: phase {self.phase}, {step}"


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
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
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
            time.sleep(1)  # a rank that hosts the store closes it some time before its process is gone
            ended = self._ended()
        for rank in [rank for rank, beat in self.beats.items() if not beat.done]:
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
        here = [beat for beat in self.beats.values() if beat.machine == this_machine() and not beat.has_ended()]
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
        return TCPStore(host, port, None, self.is_hosted_here, wait_for_workers=False, multi_tenant=True)

    def _send_and_receive(self, store: TCPStore, mine: Heartbeat) -> None:
        store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(mine)))
        for rank in self._others:
            if store.check([key := f"{self._prefix}/{rank}"]):
                beat = Heartbeat(**json.loads(store.get(key)))
                if beat != self.beats.get(rank):
                    self.beats[rank], self._heard[rank] = beat, time.monotonic()
        if store.check([key := f"{self._prefix}/status"]):
            self.status = int(store.get(key))
