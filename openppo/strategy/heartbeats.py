"""Position and state of each rank, which all ranks exchange through the launcher's store."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
from torch.distributed import TCPStore, distributed_c10d


@dataclass(frozen=True)
class Heartbeat:
    """Position and state of a rank at one moment."""

    rank: int
    phase: str
    step: int
    idle: float
    """Seconds without progress."""
    memory: str = ""
    signal: str | None = None
    """Name of the signal that asks the run to exit."""
    status: int | None = None
    """Exit status of a rank that has finished, 0, or has reported why the run ends; None while it runs."""
    samples: bool = False
    """True on one of ``--rollout_ranks``."""
    collectives: int = 0
    """Collectives started so far in groups of all training ranks, or of all sampling ones."""
    launcher: int = 0
    """First rank of the launcher that started this one: torchrun and ``deepspeed`` have a process on each host."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """The rank in the launch, marked if it samples."""
        return f"rollout rank {self.rank}" if self.samples else f"rank {self.rank}"

    def waits_for(self, other: "Heartbeat") -> bool:
        """True if ``other`` has yet to start a collective, a transfer of weights or its work.

        Stacks do not show this: on a GPU a rank waits where it reads a result, outside any frame of a collective.
        """
        if other.status is not None:
            return False
        if other.phase == "loading" and self.phase != "loading":
            return True
        if self.samples == other.samples:
            return other.collectives < self.collectives
        if self.phase != "sync":
            return False
        # Samplers get the weights from trainers, which wait for samplers that are still in an earlier step.
        if self.samples:
            return other.phase == "sync"
        return other.phase != "sync" and other.step <= self.step

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{self.name}{host}: phase {self.phase}, {step}"


def collectives_started() -> int:
    """Return the number of collectives that this rank has started in groups of all ranks.

    Other ranks start the same ones, in the same order.
    """
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    largest = max((group.size() for group in groups), default=0)
    n_started = 0
    for group in groups:
        if group.size() == largest:
            backends = [group._get_backend(device) for device in group._device_types]
            n_started += sum(backend._get_sequence_number_for_group() for backend in backends)
    return n_started


class HeartbeatStore:
    """Heartbeats of all ranks, exchanged through a client of its own; idle with one rank.

    A client of the launcher's store is locked during a blocking wait, so the training thread's client could not carry
    heartbeats.
    """

    def __init__(self, limit: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.launcher = self.rank - int(os.environ.get("LOCAL_RANK", "0"))
        self.beats: dict[int, Heartbeat] = {}
        """The newest heartbeat of each other rank."""
        self.lost: dict[int, str] = {}
        """Ranks that cannot finish, each with the reason."""
        self.error: str | None = None
        """The store's error, None if it answered the last exchange."""

        self._limit = limit
        self._received_at: dict[int, float] = {}

        # torchrun's store outlives a restart of the ranks, so each start has keys of its own (see comm.py).
        has_restarts = os.environ.get("GROUP_WORLD_SIZE") == "1"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") if has_restarts else "0"
        self._prefix = f"openppo/{restart}"

        # Without torchrun's agent, the first of several ranks hosts the store.
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.is_hosted_here = self.n_ranks > 1 and self.rank == 0 and not has_agent
        self._store: TCPStore | None = None

    def exchange(self, heartbeat: Heartbeat) -> None:
        """Publish this rank's heartbeat, read those of the other ranks, and look for lost ones."""
        # Listed before reading, so that the stored heartbeats of these ranks are final.
        ended = [rank for rank, beat in self.beats.items() if self.has_ended(beat)]
        self.error = None
        try:
            store = self._client()
            if store is not None:
                self._send_and_receive(store, heartbeat)
        except RuntimeError as error:  # torch's store raises several subclasses of it
            self.error = str(error).splitlines()[0]

        for rank, beat in self.beats.items():
            silent = time.monotonic() - self._received_at[rank]
            if beat.status is not None or (rank not in ended and silent <= self._limit):
                continue
            # A rank that holds Python's lock is ended by its timer, at 0.9 of the limit.
            is_silent = silent > 0.8 * self._limit
            reason = f"no heartbeat for {silent:.0f} s (--heartbeat_timeout)"
            self.lost[rank] = reason if is_silent else "its process has ended"

    def claim(self, key: str) -> bool:
        """Return True on the first rank that claims ``key``.

        If the store fails, return True on the first living rank of each machine.
        """
        with suppress(RuntimeError):
            store = self._client()
            return store is None or store.add(f"{self._prefix}/{key}", 1) == 1

        here = filter(self.is_here, self.beats.values())
        return all(beat.rank > self.rank or self.has_ended(beat) for beat in here)

    def is_here(self, beat: Heartbeat) -> bool:
        """True if the rank's process id means a process of this machine, and not of another container."""
        return beat.host == socket.gethostname() and beat.launcher == self.launcher

    def has_ended(self, beat: Heartbeat) -> bool:
        """True if the rank's process ran on this machine and is gone."""
        try:
            return self.is_here(beat) and psutil.Process(beat.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def kill_lost(self) -> None:
        """Kill lost ranks of this machine, which the launcher would wait for."""
        for rank in self.lost:
            with suppress(ProcessLookupError):
                if self.is_here(self.beats[rank]):
                    os.kill(self.beats[rank].pid, signal.SIGKILL)

    def _client(self) -> TCPStore | None:
        """Return a client of the store, None with one rank and until the store can be reached.

        torch's client would wait for a store that it cannot reach, and warn on stderr.
        """
        if self._store is not None or self.n_ranks == 1:
            return self._store
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        if not self.is_hosted_here:
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                return None
        self._store = TCPStore(
            host, port, None, self.is_hosted_here, wait_for_workers=False, multi_tenant=True
        )
        return self._store

    def _send_and_receive(self, store: TCPStore, heartbeat: Heartbeat) -> None:
        store.set(f"{self._prefix}/{self.rank}", json.dumps(asdict(heartbeat)))

        for rank in range(self.n_ranks):
            key = f"{self._prefix}/{rank}"
            if rank != self.rank and store.check([key]):
                beat = Heartbeat(**json.loads(store.get(key)))
                if beat != self.beats.get(rank):
                    self._received_at[rank] = time.monotonic()
                    # A new dict, since another thread may read the present one.
                    self.beats = self.beats | {rank: beat}
