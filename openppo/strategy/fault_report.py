"""Position and state of a rank, and the one-page report of a run that cannot continue."""

import errno
import os
import re
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    # NCCL allocates its own buffers:
    "Cuda failure (2 )?'out of memory'"
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
    """Return kernel and PID namespace, within which process ids are unique."""
    with suppress(OSError):  # only Linux has these files
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


@dataclass(frozen=True)
class Heartbeat:
    """Position and state of a rank at one moment."""

    rank: int
    phase: str
    step: int
    idle: float
    """Seconds without progress."""
    memory: str = ""
    signal: str | None = None
    """Name of the signal that asks the run to exit."""
    done: bool = False
    samples: bool = False
    """True on one of ``--rollout_ranks``."""
    collectives: int = 0
    """Collectives started so far in groups of all training ranks, or of all sampling ones."""
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=this_machine)
    pid: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """The rank in the launch, marked if it samples."""
        return f"rollout rank {self.rank}" if self.samples else f"rank {self.rank}"

    def has_ended(self) -> bool:
        """True if the rank's process ran on this machine and is gone."""
        if self.machine != this_machine():
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def waits_for(self, other: "Heartbeat") -> bool:
        """True if ``other`` has yet to start a collective, a transfer of weights or its work.

        Stacks do not show this: on a GPU a rank waits where it reads a result, outside any frame of a collective.
        """
        if other.done:
            return False
        if other.phase == "loading" and self.phase != "loading":
            return True
        if self.samples == other.samples:
            return other.collectives < self.collectives
        if self.phase != "sync":
            return False
        # Samplers get the weights from trainers, which wait for samplers that are still in an earlier step.
        if self.samples:
            return other.phase == "sync"
        return other.phase != "sync" and other.step <= self.step

    def __str__(self) -> str:
        host = "" if self.host == socket.gethostname() else f" on {self.host}"
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{self.name}{host}: phase {self.phase}, {step}"


@dataclass(frozen=True)
class Fault:
    """The failure that ends a run, and the ranks that failed."""

    message: str
    where: Sequence[Heartbeat]
    look_at: str = ""
    details: str = ""
    """Traceback."""
    memory: Sequence[tuple[str, str]] = ()
    """Further rows of the report: label and line."""

    def render(self, beats: Iterable[Heartbeat], resume: str) -> str:
        """Return the page. ``beats`` are of all ranks; ``resume`` tells how to continue after a failure."""
        failed = {beat.rank for beat in self.where}
        others = [beat for beat in beats if beat.rank not in failed]
        others.sort(key=lambda beat: beat.rank)

        rows = [("fault", self.message)]
        rows += [("where", str(beat)) for beat in self.where]
        rows += self.memory
        rows += [("others", str(beat)) for beat in others]
        rows += [("look at", self.look_at), ("resume", resume)]

        text = "".join(f"{name + ':':<9}{line}\n" for name, line in rows if line)
        details = f"{self.details.rstrip()}\n\n" if self.details else ""
        return f"\n{_TITLE:=^100}\n{details}{text}{'':=^100}\n"


class MemoryView(NamedTuple):
    """Memory of a run, for the report of an out-of-memory error."""

    lines: Sequence[str] = ()
    is_foreign: bool = False
    """True if no option of the run can make the holder of the memory smaller."""


ExplainMemory = Callable[[str], MemoryView]
"""Returns the memory of a run in a phase."""


def explain_nothing(phase: str) -> MemoryView:
    """Return an empty view, for runs whose memory is not estimated."""
    return MemoryView()


def raised(
    error: BaseException, where: Heartbeat, options: Mapping[str, Any], explain: ExplainMemory
) -> Fault:
    """Return the fault for an error of this rank.

    An out-of-memory error comes with the sizes in ``options`` and the memory from ``explain``.
    """
    text = mask_credentials("".join(traceback.format_exception(error)))
    message = mask_credentials(traceback.format_exception_only(error)[-1]).splitlines()[0]
    look_at = ""
    memory: list[tuple[str, str]] = []
    if is_out_of_memory(error):
        memory = _memory_rows(where.phase, options, explain(where.phase))
    elif is_broken_connection(error):
        look_at = "the network between the ranks: a connection broke, and all ranks are alive"
    elif folder := options.get("save_path"):
        look_at = f"{folder}/logs: metrics and samples until then"
    return Fault(f"{where.name} raised {message}", [where], look_at, details=text, memory=memory)


def _memory_rows(phase: str, options: Mapping[str, Any], view: MemoryView) -> list[tuple[str, str]]:
    """Return the rows on memory of an out-of-memory report, with a remedy if there is one."""
    lines = [host_memory(), f"options: {' '.join(sizes(options))}", *view.lines]
    rows = [("memory", line) for line in lines]
    if view.is_foreign:
        rows.append(("try", "end what else holds the GPU's memory: nvidia-smi lists processes"))
        return rows

    flags = remedies(phase, options, on_cpu=not torch.cuda.is_available())
    if flags:
        rows.append(("try", f"reduce memory in {phase} with {', '.join(flags)}"))
    return rows


def lost(reasons: Mapping[int, str], beats: Mapping[int, Heartbeat]) -> Fault:
    """Return the fault for other ranks that are gone, with a reason for each."""
    where = [beats[rank] for rank in reasons]
    message = "; ".join(f"{beats[rank].name} is gone: {why}" for rank, why in reasons.items())
    look_at = _SILENT if "heartbeat" in message else _EXIT_CODES
    memory = [
        ("memory", f"rank {beat.rank} at its last heartbeat: {beat.memory}") for beat in where
    ]
    return Fault(message, where, look_at, memory=memory)


def stalled(where: Heartbeat) -> Fault:
    """Return the fault for this rank without progress."""
    message = f"{where.name} made no progress for {where.idle:.0f} s (--stall_timeout)"
    look_at = "the stacks above. If the work is only slow, raise --stall_timeout"
    return Fault(message, [where], look_at)


def collectives_started() -> int:
    """Return the number of collectives that this rank has started in groups of all ranks.

    Other ranks start the same ones, in the same order.
    """
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    largest = max((group.size() for group in groups), default=0)
    n_started = 0
    for group in groups:
        if group.size() < largest:
            continue
        for device in group._device_types:
            n_started += group._get_backend(device)._get_sequence_number_for_group()
    return n_started


def is_out_of_memory(error: BaseException) -> bool:
    """True if ``error`` or a cause of it is a lack of GPU or CPU memory."""
    return any(_lacks_memory(cause) for cause in _causes(error))


def _lacks_memory(cause: BaseException) -> bool:
    if isinstance(cause, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:
        return True
    return isinstance(cause, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(cause)))


def is_broken_connection(error: BaseException) -> bool:
    """True if ``error`` may come from a connection that another rank closed."""
    return not is_out_of_memory(error) and any(map(_is_connection_error, _causes(error)))


def _is_connection_error(cause: BaseException) -> bool:
    if isinstance(cause, DistError):
        return True
    text = str(cause)
    return "gloo/transport" in text and "enforce fail" not in text


def host_memory() -> str:
    """Return a line on the memory of this process, of its machine and of its container."""
    process = psutil.Process().memory_info().rss
    machine = psutil.virtual_memory()
    gib = 2**30
    text = f"process {process / gib:.2f} GiB"
    text += f", machine {machine.available / gib:.2f} GiB available"
    text += f" of {machine.total / gib:.2f} GiB"
    with suppress(OSError):
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        if most != "max":
            text += f", container {int(used) / gib:.2f} GiB used of {int(most) / gib:.2f} GiB"
    return text


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and the errors that led to it, latest first."""
    while error is not None:
        yield error
        context = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or context
