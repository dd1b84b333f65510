"""Signals become requests while a pipe is open, and nothing changes before and after."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from openppo.strategy import interrupt


@pytest.fixture
def pipe() -> Iterator[interrupt.SignalPipe]:
    opened = interrupt.SignalPipe()
    yield opened
    opened.close()


def test_a_signal_arrives_as_its_name(pipe: interrupt.SignalPipe) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
        assert pipe.wait(5) == [number.name]
    assert pipe.wait(0) == []


def test_a_signal_arrives_while_the_main_thread_is_inside_c(pipe: interrupt.SignalPipe) -> None:
    arrived: list[tuple[list[str], float]] = []
    thread = threading.Thread(target=lambda: arrived.append((pipe.wait(60), time.monotonic())))
    thread.start()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)  # seconds in which no handler of Python can run
    back = time.monotonic()
    thread.join()
    ((names, when),) = arrived
    assert names == ["SIGTERM"]
    assert when < back


def test_other_threads_can_end_a_wait(pipe: interrupt.SignalPipe) -> None:
    threading.Timer(0.1, pipe.wake).start()
    assert pipe.wait(60) == []


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def test_an_ignored_hangup_stays_ignored_unless_torchrun_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        for by_torchrun, expected in ((None, []), ("SIGTERM,SIGINT", []), ("SIGTERM,SIGHUP", ["SIGHUP"])):
            monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
            if by_torchrun is not None:
                monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", by_torchrun)
            opened = interrupt.SignalPipe()
            os.kill(os.getpid(), signal.SIGHUP)
            assert opened.wait(0.1) == expected
            opened.close()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_as_before_when_the_pipe_is_closed() -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    assert not interrupt.installed()
    opened = interrupt.SignalPipe()
    assert interrupt.installed()
    opened.close()
    assert [signal.getsignal(number) for number in HANDLED] == before
    assert not interrupt.installed()


def test_child_processes_end_by_signals_of_their_own(pipe: interrupt.SignalPipe) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, [1, 2])
        pool.terminate()  # with SIGTERM
        pool.join()
    assert pipe.wait(0.5) == [], "the signal of a child is none of ours"


SIGNALLED_AT_BIRTH = """
import os, signal
from openppo.strategy.interrupt import SignalPipe

def end_by_signal():
    os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=end_by_signal)  # before the pipe's own hooks
pipe = SignalPipe()
child = os.fork()
if child == 0:
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, status
assert pipe.wait(0.5) == []
os.kill(os.getpid(), signal.SIGTERM)
assert pipe.wait(60) == ["SIGTERM"], "the parent still hears its own"
"""


def test_a_child_that_is_ended_as_it_begins_ends_and_its_signal_is_none_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_AT_BIRTH], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_first_request_counts_until_the_next_pipe(pipe: interrupt.SignalPipe) -> None:
    assert interrupt.requested() is None
    interrupt.request("SIGTERM")
    interrupt.request("SIGINT")
    assert interrupt.requested() == "SIGTERM"


def test_requests_are_deferred_only_inside() -> None:
    assert not interrupt.is_deferred()
    with pytest.raises(KeyError), interrupt.deferred():
        assert interrupt.is_deferred()
        raise KeyError
    assert not interrupt.is_deferred()
