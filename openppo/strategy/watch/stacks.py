"""Where threads stand: of this process now; of another one now, or when it crashed."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sysconfig
import tempfile
import threading
import time
import traceback
from pathlib import Path

from openppo.strategy.watch.peers import STACKS_SIGNAL, Beat, process_lives

_SECONDS_TO_WRITE = 1.0
_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def stacks_of_threads() -> str:
    """Of this process, without the thread that asks and those that wait for work inside libraries."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    found, stacks = [], _stacks()
    for ident, stack in stacks.items():
        if ident in names and (ident == threading.main_thread().ident or _is_at_work(stack)):
            found.append(f"Thread {names[ident]}:\n{''.join(traceback.format_list(stack))}")
    if stacks and threading.main_thread().ident not in stacks:
        found.append(f"of {threading.active_count()} threads the newest, more were not to be had")
    return "\n".join(found)


def in_collective() -> bool:
    """Whether a thread of this process waits for other ranks: in a collective, for one under ZeRO-3, or for its GPU."""
    return any(_waits_for_others(frame) for stack in _stacks().values() for frame in stack)


def _waits_for_others(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    return (
        file.endswith("torch/distributed/distributed_c10d.py")
        or ("deepspeed/runtime/zero/" in file and frame.name == "wait")
        or (file.endswith("torch/cuda/__init__.py") and frame.name == "synchronize")
    )


def _stacks() -> dict[int, list[traceback.FrameSummary]]:
    """Of each thread by its ident, the innermost 100 frames, outermost first; nothing where no file can be opened.

    C reads them here, under Python's lock. Asking a running thread's frame for ``f_back`` makes a frame object, which
    may collect garbage and let that thread run on and leave the frame: CPython 3.11 then crashes.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    stacks: dict[int, list[traceback.FrameSummary]] = {}
    stack: list[traceback.FrameSummary] = []
    for line in lines:
        if thread := _THREAD.match(line):
            stack = stacks[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            stack.insert(0, traceback.FrameSummary(frame[1], int(frame[2]), frame[3]))
    return stacks


def _is_at_work(stack: list[traceback.FrameSummary]) -> bool:
    return any(not frame.filename.startswith((*_LIBRARIES, "<frozen")) for frame in stack)


def _is_written(file: Path) -> bool:
    """Whether something is there, and no more comes."""
    try:
        size = file.stat().st_size
        time.sleep(_SECONDS_TO_WRITE / 10)
        return 0 < size == file.stat().st_size
    except OSError:
        return True


def written_stacks(beat: Beat) -> str:
    """The Python stacks that a crash left, or that a process writes now; empty without any, or on another host.

    A process that still runs may crash while it writes: only for one that will be killed.
    """
    file = Path(beat.stacks)
    if beat.is_here and process_lives(beat.pid):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(beat.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _SECONDS_TO_WRITE
        while time.monotonic() < deadline and not _is_written(file):
            pass
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))
