"""Where threads stand: of this process now, and of another one when it crashed."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from openppo.strategy.watch.peers import Beat

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


def written_stacks(beat: Beat) -> str:
    """The Python stacks that a crash left, once; empty without any, or on another host."""
    try:
        lines = Path(beat.stacks).read_text().splitlines()
        Path(beat.stacks).unlink()
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))
