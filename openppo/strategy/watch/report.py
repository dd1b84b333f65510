"""The one report of a run that cannot go on."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from openppo.strategy.watch.peers import Beat

_WIDTH = 100
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Fault:
    """What went wrong, and on which ranks."""

    what: str
    where: Sequence[Beat]
    details: str = ""
    """Traceback, or the stacks of all threads."""
    memory: Sequence[str] = ()
    look_at: Sequence[str] = ()
    lower: Sequence[str] = ()
    """What to do about memory."""


def render(fault: Fault, others: Sequence[Beat], resume: str) -> str:
    """The report; ``others`` are the ranks that are well."""
    ranks = [*fault.where, *others]
    several_hosts = len({beat.host for beat in ranks}) > 1

    def position(beat: Beat) -> str:
        host = f" on {beat.host}" if several_hosts else ""
        step = f"step {beat.step}" if beat.step > 0 else "before the first step"
        return f"rank {beat.rank}{host}: phase {beat.phase}, {step}"

    rows = [("fault", fault.what), *(("where", position(beat)) for beat in fault.where)]
    rows += [("memory", line) for line in fault.memory]
    rows += [("lower", line) for line in fault.lower]
    rows += [("others", position(beat)) for beat in others]
    rows += [("look at", line) for line in fault.look_at]
    rows += [("resume", line) for line in (resume, _restart()) if line]
    text = "".join(f"{name + ':':<9}{line}\n" for name, line in rows)
    title = " OpenPPO: the run has failed "
    details = f"{fault.details.rstrip()}\n\n" if fault.details else ""
    return f"\n{title:=^{_WIDTH}}\n{details}{text}{'':=^{_WIDTH}}\n"


def stacks_of_threads(leave_out: threading.Thread) -> str:
    """Where the threads of this process are; those that wait for work inside libraries are left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate() if thread is not leave_out}
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
    """The Python stacks that a crash left; empty without any, or on another host."""
    try:
        lines = Path(beat.stacks).read_text().splitlines() if beat.stacks else []
    except OSError:
        return ""
    return "\n".join(line for line in lines if not line.startswith("Extension modules:"))


def _restart() -> str:
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return f"torchrun starts all ranks again (restart {done + 1} of {most})" if done < most else ""
