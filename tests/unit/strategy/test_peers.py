"""What ranks know of each other, through a real store within one process."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from openppo.strategy.watch.peers import STACKS_SIGNAL, Beat, Peers, StoreLostError, process_lives, this_machine
from openppo.strategy.watch.stacks import written_stacks

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
    assert first.lost(time.monotonic()) == {1: "its process has ended"}


def test_a_process_that_cannot_open_a_file_takes_no_other_for_dead(
    peers: tuple[Peers, Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = peers
    second.tell(Beat(rank=1, count=1, machine=this_machine(), pid=os.getpid()))
    first.exchange(Beat(rank=0))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert first.lost(time.monotonic()) == {}


def test_a_rank_that_said_it_is_done_and_ended_since_it_was_heard_is_not_lost(
    peers: tuple[Peers, Peers], ended_process: int
) -> None:
    first, second = peers
    second.tell(Beat(rank=1, count=1, machine=this_machine(), pid=ended_process))
    first.exchange(Beat(rank=0))
    second.tell(Beat(rank=1, count=2, machine=this_machine(), pid=ended_process, done=True))
    assert first.lost(time.monotonic()) == {}


def test_a_process_that_was_stopped_in_the_middle_of_a_look_finds_nobody_silent(peers: tuple[Peers, Peers]) -> None:
    first, _ = peers
    first.silence = 0.2
    first.exchange(Beat(rank=0))
    before = time.monotonic()
    time.sleep(0.4)
    first.exchange(Beat(rank=0))
    assert first.lost(before) == {}
    assert first.lost(time.monotonic()).keys() == {1}


STORE = """
from torch.distributed import TCPStore
import time
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


def stop(host: "subprocess.Popen[str]") -> None:
    """Returns when all its threads stand still, which is later than the signal."""
    host.send_signal(signal.SIGSTOP)
    tasks = list(Path(f"/proc/{host.pid}/task").iterdir())
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks):
        time.sleep(0.01)


def test_a_store_that_is_silent_is_waited_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own time-outs do not bound that: the connection is there, and nobody answers."""
    monkeypatch.setattr("openppo.strategy.watch.peers._STORE_TIMEOUT", 2.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            monkeypatch.setenv("MASTER_PORT", host.stdout.readline().strip())
            peers = Peers(0, world_size=2, silence=1)
            peers.exchange(Beat(rank=0))
            stop(host)
            goes_on = threading.Timer(0.5, host.send_signal, [signal.SIGCONT])
            goes_on.start()
            peers.exchange(Beat(rank=0))  # it goes on, and so does this
            goes_on.join()
            stop(host)
            for _ in range(2):
                with pytest.raises(StoreLostError):
                    peers.exchange(Beat(rank=0))
            assert peers.may_speak(), "without a store the first rank of a machine"
        finally:
            host.kill()


HOLDS = f"""
import ctypes, faulthandler, sys
faulthandler.register({STACKS_SIGNAL}, open(sys.argv[1], "w"))
def hold():
    print("holds", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(300)  # PyDLL keeps Python's lock; a signal ends the sleep
hold()
"""


def test_a_process_that_holds_the_lock_of_python_writes_where_it_stands_and_is_ended(
    peers: tuple[Peers, Peers], tmp_path: Path
) -> None:
    first, second = peers
    stacks = tmp_path / "stacks"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(stacks)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            second.tell(Beat(rank=1, count=1, machine=this_machine(), pid=process.pid, stacks=str(stacks)))
            first.exchange(Beat(rank=0))
            assert "in hold" in written_stacks(first.beats[1])
            first.kill([1])
            assert process.wait(timeout=20) == -9
            assert not stacks.exists()
        finally:
            process.kill()
