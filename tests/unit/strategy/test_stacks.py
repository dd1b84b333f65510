from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from openppo.strategy.watch.stacks import in_collective, stacks_of_threads

# Garbage is collected while frames are looked at, runs Python code then, and so lets the other thread leave them.
A_THREAD_IN_MOTION = """
import gc, sys, threading, time, weakref
from openppo.strategy.watch.stacks import in_collective

class Cycle:
    pass

def collected(reference):
    time.sleep(0)

references = []

def leave_garbage():
    cycle = Cycle()
    cycle.itself = cycle
    references.append(weakref.ref(cycle, collected))
    [[] for _ in range(20)]
    if len(references) > 1000:
        references.clear()

def dive(depth):
    leave_garbage()
    if depth:
        dive(depth - 1)

def work():
    while True:
        dive(90)

gc.freeze()
gc.set_threshold(80)
sys.setswitchinterval(1e-5)
threading.Thread(target=work, daemon=True).start()
until = time.monotonic() + 5
while time.monotonic() < until:
    sum(range(300))  # a while in which the other thread may go on
    in_collective()
"""


def test_threads_are_looked_at_while_they_run() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", A_THREAD_IN_MOTION], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def _while_a_thread_waits_in(filename: str, look: Callable[[], object], name: str = "hold") -> object:
    waits, may_go = threading.Event(), threading.Event()
    names: dict[str, Callable[..., None]] = {}
    exec(compile(f"def {name}(waits, may_go):\n    waits.set()\n    may_go.wait()", filename, "exec"), names)
    thread = threading.Thread(target=names[name], args=(waits, may_go), name="holder")
    thread.start()
    waits.wait()
    try:
        return look()
    finally:
        may_go.set()
        thread.join()


@pytest.mark.parametrize(
    ("file", "function", "waits"),
    [
        ("torch/distributed/distributed_c10d.py", "barrier", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "wait", True),
        ("deepspeed/runtime/zero/partition_parameters.py", "gather", False),
        ("torch/cuda/__init__.py", "synchronize", True),
        ("torch/cuda/__init__.py", "set_device", False),
        ("torch/other.py", "wait", False),
    ],
)
def test_a_thread_that_waits_for_other_ranks_is_seen(file: str, function: str, waits: bool) -> None:
    assert not in_collective()
    assert _while_a_thread_waits_in(f"/site-packages/{file}", in_collective, function) == waits


def test_where_no_file_can_be_opened_nothing_is_known_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert not in_collective()
    assert stacks_of_threads() == ""


def test_stacks_name_the_thread_and_its_frames_outermost_first() -> None:
    text = str(_while_a_thread_waits_in("/home/me/train.py", stacks_of_threads))
    assert "Thread holder:" in text
    stack = text[text.index("Thread holder:") :]
    assert 0 < stack.index("in _bootstrap\n") < stack.index('"/home/me/train.py", line 3, in hold')
    assert threading.current_thread().name not in text
