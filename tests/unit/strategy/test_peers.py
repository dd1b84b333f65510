"""What ranks know of each other, through a real store within one process."""

import socket
import subprocess
from pathlib import Path

import pytest

from openppo.strategy.watch.peers import Beat, Peers, process_lives, this_machine

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked at in /proc")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> tuple[Peers, Peers]:
    """Ranks 0 and 1; rank 0 hosts the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    first, second = (Peers(rank, world_size=2, silence=60) for rank in (0, 1))
    assert first.tell(Beat(rank=0)) and second.tell(Beat(rank=1))
    return first, second


@pytest.fixture
def ended_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert not process_lives(process.pid)
    return process.pid


def test_a_rank_whose_process_has_ended_is_lost(peers: tuple[Peers, Peers], ended_process: int) -> None:
    first, second = peers
    second.tell(Beat(rank=1, count=1, machine=this_machine(), pid=ended_process))
    first.exchange(Beat(rank=0))
    assert first.lost() == {1: "its process has ended"}


def test_a_rank_that_said_it_is_done_and_ended_since_it_was_heard_is_not_lost(
    peers: tuple[Peers, Peers], ended_process: int
) -> None:
    first, second = peers
    second.tell(Beat(rank=1, count=1, machine=this_machine(), pid=ended_process))
    first.exchange(Beat(rank=0))
    second.tell(Beat(rank=1, count=2, machine=this_machine(), pid=ended_process, done=True))
    assert first.lost() == {}
