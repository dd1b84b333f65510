"""Signals set a flag while they are installed, and nothing changes before and after."""

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

from openppo.strategy import signals

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def installed() -> Iterator[None]:
    # Not those of nohup, or of an earlier test in this process: children end by the default.
    around = {number: signal.signal(number, signal.SIG_DFL) for number in HANDLED}
    signals.install()
    yield
    signals.uninstall()
    assert [signal.getsignal(number) for number in HANDLED] == [signal.SIG_DFL] * len(HANDLED)
    for number, handler in around.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def test_a_signal_arrives_while_the_main_thread_is_inside_c(installed):
    arrived: list[tuple[list[str], float]] = []
    thread = threading.Thread(
        target=lambda: arrived.append((signals.receive(60), time.monotonic()))
    )
    thread.start()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac(
        "sha256", b"", b"", 5_000_000
    )  # seconds in which no handler of Python can run
    back = time.monotonic()
    thread.join()
    ((names, when),) = arrived
    assert names == ["SIGTERM"]
    assert when < back
    for number in HANDLED:
        os.kill(os.getpid(), number)
        assert signals.receive(5) == [number.name]
    assert signals.receive(0) == []
    threading.Timer(0.1, signals.wake).start()
    assert signals.receive(60) == [], "another thread can end a wait"


def test_an_ignored_hangup_stays_ignored_unless_torchrun_passes_it_on(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        for by_torchrun, expected in (("SIGTERM,SIGINT", []), ("SIGTERM,SIGHUP", ["SIGHUP"])):
            monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", by_torchrun)
            signals.install()
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.receive(0.1) == expected
            signals.uninstall()
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_request_counts_until_the_next_install(installed):
    assert signals.requested() is None
    signals.request("SIGTERM")
    signals.request("SIGINT")
    assert signals.requested() == "SIGTERM"
    signals.uninstall()
    assert signals.requested() is None, "nothing asks work outside"
    signals.install()
    assert signals.requested() is None


FORKS = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # before that of signals
from openppo.strategy import signals
signals.install()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == signal.SIGTERM, "the child has ended by its own signal"
assert signals.receive(0.5) == [], "which has asked nothing of the run"
"""


def test_a_signal_at_the_moment_of_a_fork_is_the_childs():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=600)


def test_a_child_ends_by_its_own_signals(installed):
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for child in children:
        child.start()
        child.terminate()  # with SIGTERM
        child.join(60)
    assert [child.exitcode for child in children] == [-signal.SIGTERM] * 2
    assert signals.receive(0.5) == [], "the signal of a child is not ours"
