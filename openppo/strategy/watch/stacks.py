"""Where threads stand: of this process now; of another one now, or when it crashed."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from openppo.strategy.watch.peers import STACKS_SIGNAL, Beat, process_lives

_SECONDS_TO_WRITE = 1.0
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


def stacks_of_threads() -> str:
    """Of this process, without the thread that asks and those that wait for work inside libraries."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident in names and (ident == threading.main_thread().ident or _is_at_work(frame)):
            found.append(f"Thread {names[ident]}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)


def in_collective() -> bool:
    """Whether a thread of this process is inside a collective of torch."""
    return any(
        file.endswith("torch/distributed/distributed_c10d.py")
        for frame in sys._current_frames().values()
        for file in _files(frame)
    )


def _is_at_work(frame: FrameType) -> bool:
    return any(not file.startswith((*_LIBRARIES, "<frozen")) for file in _files(frame))


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


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
        os.kill(beat.pid, STACKS_SIGNAL)
        deadline = time.monotonic() + _SECONDS_TO_WRITE
        while time.monotonic() < deadline and not _is_written(file):
            pass
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))
