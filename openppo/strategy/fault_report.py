"""Position and state of a rank, and the one-page report of a run that cannot continue."""

import errno
import faulthandler
import os
import re
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.distributed import DistError, distributed_c10d

from openppo.config import mask_credentials
from openppo.config.remedies import remedies, sizes

_TITLE = " OpenPPO: the run has failed "
_OUT_OF_MEMORY = re.compile(
    "DefaultCPUAllocator|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory|"
    "Cuda failure (2 )?'out of memory'"  # of NCCL, which allocates its own buffers
)
_WAITS = re.compile(
    r'torch/distributed/distributed_c10d\.py"|deepspeed/runtime/zero/.* in wait$|torch/cuda/.* in synchronize$'
    r'|openppo/strategy/weights\.py", line \d+ in _broadcast$',
    re.M,
)
_EXIT_CODES = (
    "the exit code in the launcher's summary below. -9: killed, usually by the kernel's OOM killer (check dmesg); "
    "-11: a crash in C code and -6: an abort, both with the stacks above"
)
_SILENT = (
    "the stacks above, if any: a thread that holds Python's lock stops heartbeats. If its work is only slow, raise "
    "--heartbeat_timeout"
)


@cache
def this_machine() -> str:
    """Kernel and PID namespace, within which process ids are unique."""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@dataclass(frozen=True)
class Heartbeat:
    """Position and state of a rank: ``idle`` seconds without progress, the ``signal`` that asks the run to exit."""

    rank: int
    phase: str
    step: int
    idle: float
    memory: str = ""
    signal: str | None = None
    done: bool = False
    samples: bool = False  # one of --rollout_ranks
    collectives: int = 0  # started so far in groups of all ranks of its side
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=this_machine)
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """The rank of the launch, and on which side it is."""
        return f"{'rollout ' * self.samples}rank {self.rank}"

    def has_ended(self) -> bool:
        """Whether the rank's process was on this machine and is gone."""
        try:
            return (
                self.machine == this_machine()
                and psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return True

    def waits_for(self, other: "Heartbeat") -> bool:
        """Whether ``other`` still loads or, on the same side, has started fewer collectives: the next waits for it.

        On a GPU a rank waits where it reads a result, in no frame of a collective.
        """
        still_loads = other.phase == "loading" != self.phase
        is_behind = self.samples == other.samples and other.collectives < self.collectives
        return not other.done and (still_loads or is_behind)

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{self.name}{host}: phase {self.phase}, {step}"


@dataclass(frozen=True)
class Fault:
    """What went wrong, and on which ranks."""

    what: str
    where: Sequence[Heartbeat]
    look_at: str = ""
    details: str = ""  # traceback, or the stacks of all threads
    memory: Sequence[tuple[str, str]] = ()  # further rows: label and line

    def render(self, others: Sequence[Heartbeat], resume: str) -> str:
        """The page. ``others`` are the healthy ranks; ``resume`` says how to continue after a failure."""
        rows = [("fault", self.what), *(("where", str(beat)) for beat in self.where), *self.memory]
        rows += [
            *(("others", str(beat)) for beat in others),
            ("look at", self.look_at),
            ("resume", resume),
        ]
        text = "".join(f"{name + ':':<9}{line}\n" for name, line in rows if line)
        details = f"{self.details.rstrip()}\n\n" if self.details else ""
        return f"\n{_TITLE:=^100}\n{details}{text}{'':=^100}\n"


class MemoryView(NamedTuple):
    """What a run takes of memory, for the report of a lack of it."""

    lines: Sequence[str] = ()
    is_foreign: bool = False
    """Whether the memory is held by something that no option of the run makes smaller."""


ExplainMemory = Callable[[str], MemoryView]
"""What a run takes in a phase."""


def raised(
    error: BaseException, where: Heartbeat, options: Mapping[str, Any], explain: ExplainMemory
) -> Fault:
    """An error of this rank. Out of memory, with the sizes in ``options`` and what ``explain`` says."""
    text = mask_credentials("".join(traceback.format_exception(error)))
    message = mask_credentials(traceback.format_exception_only(error)[-1]).splitlines()[0]
    look_at, memory = "", []
    if is_out_of_memory(error):
        view = explain(where.phase)
        lines = (host_memory(), f"options: {' '.join(sizes(options))}", *view.lines)
        memory = [("memory", line) for line in lines]
        if view.is_foreign:
            memory.append(
                ("try", "end what else holds the GPU's memory: nvidia-smi lists processes")
            )
        elif flags := remedies(where.phase, options, on_cpu=not torch.cuda.is_available()):
            memory.append(("try", f"reduce memory in {where.phase} with {', '.join(flags)}"))
    elif is_broken_connection(error):
        look_at = "the network between the ranks: a connection broke, and all ranks are alive"
    elif folder := options.get("save_path"):
        look_at = f"{folder}/logs: metrics and samples until then"
    return Fault(f"{where.name} raised {message}", [where], look_at, details=text, memory=memory)


def lost(ranks: Mapping[int, str], beats: Mapping[int, Heartbeat]) -> Fault:
    """Other ranks that are gone, for these reasons."""
    where = [beats[rank] for rank in ranks]
    what = "; ".join(
        f"{beat.name} is gone: {why}" for beat, why in zip(where, ranks.values(), strict=True)
    )
    memory = [
        ("memory", f"rank {beat.rank} at its last heartbeat: {beat.memory}") for beat in where
    ]
    return Fault(what, where, _SILENT if "heartbeat" in what else _EXIT_CODES, memory=memory)


def stalled(where: Heartbeat) -> Fault:
    """No progress of this rank."""
    what = f"{where.name} made no progress for {where.idle:.0f} s (--stall_timeout)"
    return Fault(
        what,
        [where],
        "the stacks above. If the work is only slow, raise --stall_timeout",
        details=_stacks(),
    )


def _stacks() -> str:
    """Stacks of the other threads, read in C: CPython 3.11 may crash where Python walks frames of running threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().decode(errors="replace").split("\n\n")
    return "\n\n".join(thread for thread in threads if not thread.startswith("Current"))


def waits_for_other_ranks() -> bool:
    """Whether a thread of this process is inside a collective, or waits for its GPU."""
    return _WAITS.search(_stacks()) is not None


def collectives_started() -> int:
    """Collectives that this rank has started in groups of all ranks; those of other ranks are the same, in order."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    whole = [group for group in groups if group.size() == max(other.size() for other in groups)]
    backends = [group._get_backend(device) for group in whole for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` or a cause of it is a lack of GPU or CPU memory."""
    return any(
        isinstance(cause, MemoryError | torch.OutOfMemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or (isinstance(cause, RuntimeError) and _OUT_OF_MEMORY.search(str(cause)))
        for cause in _causes(error)
    )


def is_broken_connection(error: BaseException) -> bool:
    """Whether ``error`` may come from a connection that another rank closed."""
    return not is_out_of_memory(error) and any(
        isinstance(cause, DistError)
        or ("gloo/transport" in str(cause) and "enforce fail" not in str(cause))
        for cause in _causes(error)
    )


def host_memory() -> str:
    """Memory of this process, of its machine and of its container."""
    process = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory()
    gib = 2**30
    text = (
        f"process {process / gib:.2f} GiB, machine {machine.available / gib:.2f} GiB available of "
    )
    text += f"{machine.total / gib:.2f} GiB"
    with suppress(OSError):
        most, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current")
        )
        text += (
            ""
            if most == "max"
            else f", container {int(used) / gib:.2f} GiB used of {int(most) / gib:.2f} GiB"
        )
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
