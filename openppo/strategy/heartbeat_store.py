"""Heartbeats of all ranks, exchanged through the launcher's store."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from torch.distributed import TCPStore

from openppo.strategy.fault_report import Heartbeat, this_machine


class HeartbeatStore:
    """Heartbeats of all ranks, exchanged through a client of its own; idle with one rank.

    A client of the launcher's store is locked during a blocking wait, so the training thread's client could not carry
    heartbeats.
    """

    def __init__(self, rank: int, world_size: int, limit: float) -> None:
        self.beats: dict[int, Heartbeat] = {}
        """The newest heartbeat of each other rank."""
        self.lost: dict[int, str] = {}
        """Ranks that cannot finish, each with the reason."""
        self.status: int | None = None
        """Exit status for all ranks, once a rank has reported the reason."""
        self.error: str | None = None
        """The store's last error, None while it answers."""

        self._rank = rank
        self._limit = limit
        self._other_ranks = [other for other in range(world_size) if other != rank]
        self._received_at: dict[int, float] = {}

        # torchrun's store outlives a restart of the ranks, so each start has keys of its own (see comm.py).
        restart: str | None = "0"
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        self._prefix = f"openppo/{restart}"

        # Without torchrun's agent, rank 0 hosts the store.
        self.is_hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store: TCPStore | None = None

    def exchange(self, heartbeat: Heartbeat) -> None:
        """Publish this rank's heartbeat and read those of the other ranks."""
        if not self._other_ranks:
            return

        # Listed before reading, so that the stored heartbeats of these ranks are final.
        ended = self._ended_ranks()
        try:
            self._store = self._store or self._connect()
            if self._store is not None:
                self._send_and_receive(self._store, heartbeat)
        except RuntimeError as error:  # torch's store raises several subclasses of it
            self.error = str(error).splitlines()[0]
            # A rank that hosts the store closes it some time before its process is gone.
            time.sleep(1)
            ended = self._ended_ranks()

        for rank, beat in self.beats.items():
            if not beat.done:
                self._check_alive(rank, has_ended=rank in ended)

    def claim(self, key: str) -> bool:
        """Return True on the first rank that claims ``key``.

        If the store fails, return True on the first living rank of each machine.
        """
        with suppress(RuntimeError):
            return self._store is None or self._store.add(f"{self._prefix}/{key}", 1) == 1

        for beat in self.beats.values():
            is_here = beat.machine == this_machine() and not beat.has_ended()
            if is_here and beat.rank <= self._rank:
                return False
        return True

    def end_all(self, status: int) -> None:
        """Make all ranks exit with this status."""
        with suppress(RuntimeError):  # without a store there is no way to tell them
            if self._store is not None:
                self._store.set(f"{self._prefix}/status", str(status))

    def kill_lost(self) -> None:
        """Kill lost ranks of this machine, which the launcher would wait for."""
        for rank in self.lost:
            beat = self.beats[rank]
            with suppress(ProcessLookupError):
                if beat.machine == this_machine():
                    os.kill(beat.pid, signal.SIGKILL)

    def _ended_ranks(self) -> list[int]:
        return [rank for rank, beat in self.beats.items() if beat.has_ended()]

    def _check_alive(self, rank: int, has_ended: bool) -> None:
        """Add ``rank`` to the lost ones if its process has ended or its heartbeats have stopped."""
        silent = time.monotonic() - self._received_at[rank]
        # The rank's own timer ends it at 0.9 of the limit.
        limit = 0.8 * self._limit if has_ended else self._limit
        if silent > limit:
            self.lost[rank] = f"no heartbeat for {silent:.0f} s (--heartbeat_timeout)"
        elif has_ended:
            self.lost[rank] = "its process has ended"

    def _connect(self) -> TCPStore | None:
        """Return a client of the store, None until it can be reached.

        torch's client would wait for a store that it cannot reach, and warn on stderr.
        """
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        if not self.is_hosted_here:
            try:
                socket.create_connection((host, port), timeout=1).close()
            except OSError:
                return None
        return TCPStore(
            host, port, None, self.is_hosted_here, wait_for_workers=False, multi_tenant=True
        )

    def _send_and_receive(self, store: TCPStore, heartbeat: Heartbeat) -> None:
        store.set(f"{self._prefix}/{self._rank}", json.dumps(asdict(heartbeat)))

        for rank in self._other_ranks:
            key = f"{self._prefix}/{rank}"
            if not store.check([key]):
                continue
            beat = Heartbeat(**json.loads(store.get(key)))
            if beat != self.beats.get(rank):
                self.beats[rank] = beat
                self._received_at[rank] = time.monotonic()

        status_key = f"{self._prefix}/status"
        if store.check([status_key]):
            self.status = int(store.get(status_key))
