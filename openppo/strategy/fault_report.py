"""One-page report of a run that cannot continue."""

import os
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from openppo.config import mask_credentials
from openppo.config.remedies import remedies, sizes
from openppo.strategy.heartbeats import Heartbeat

Row = tuple[str, str]
"""A line of the report, and the label before it."""
ExplainMemory = Callable[[str], Sequence[Row]]
"""Returns rows on the memory of a run in a phase; a row "try" replaces our advice."""

_TITLE = " OpenPPO: the run has failed "
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|\[Errno 12\]|DefaultCPUAllocator|CUBLAS_STATUS_ALLOC_FAILED|"
    # The latter is of NCCL, which allocates its own buffers.
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure (2 )?'out of memory'"
)
_BROKEN_CONNECTION = re.compile(
    r"torch\.distributed\.Dist\w*Error|^(?!.*enforce fail).*gloo/transport", re.MULTILINE
)
_EXIT_CODES = (
    "the exit code in the launcher's summary below. -9: killed, usually by the kernel's OOM killer (check dmesg); "
    "-11: a crash in C code and -6: an abort, both with the stacks above"
)
_SILENT = (
    "the stacks above, if any: a thread that holds Python's lock stops heartbeats. If its work is only slow, raise "
    "--heartbeat_timeout"
)


@dataclass(frozen=True)
class Fault:
    """The failure that ends a run, and the ranks that failed."""

    message: str
    ranks: Collection[int]
    rows: Sequence[Row] = ()
    details: str = ""
    """Traceback."""

    def render(self, beats: Iterable[Heartbeat], resume: str) -> str:
        """Return the page. ``beats`` are of all ranks; ``resume`` tells how to continue after a failure."""
        rows = [("fault", self.message)]
        for beat in sorted(beats, key=lambda beat: (beat.rank not in self.ranks, beat.rank)):
            rows.append(("where" if beat.rank in self.ranks else "others", str(beat)))
        rows += [*self.rows, ("resume", resume)]

        text = "".join(f"{name + ':':<9}{line}\n" for name, line in rows if line)
        return f"\n{_TITLE:=^100}\n{self.details}{text}{'':=^100}\n"


def raised(
    error: BaseException, where: Heartbeat, options: Mapping[str, Any], explain: ExplainMemory
) -> Fault:
    """Return the fault for an error of this rank.

    An out-of-memory error comes with the sizes in ``options`` and the memory from ``explain``.
    """
    text = mask_credentials("".join(traceback.format_exception(error)))
    last = mask_credentials(traceback.format_exception_only(error)[-1])
    rows: list[Row] = []
    if is_out_of_memory(error):
        rows = _memory_rows(where.phase, options, explain(where.phase))
    elif is_broken_connection(error):
        look_at = "the network between the ranks: a connection broke, and all ranks are alive"
        rows = [("look at", look_at)]
    elif folder := options.get("save_path"):
        rows = [("look at", f"{folder}/logs: metrics and samples until then")]
    message = f"{where.name} raised {last.splitlines()[0]}"
    return Fault(message, [where.rank], rows, details=f"{text.rstrip()}\n\n")


def explain_nothing(phase: str) -> Sequence[Row]:
    """Return no rows, for runs whose memory is not estimated."""
    return ()


def _memory_rows(phase: str, options: Mapping[str, Any], explained: Sequence[Row]) -> list[Row]:
    """Return the rows on memory, with a remedy if there is one."""
    rows = [("memory", host_memory()), ("memory", f"options: {' '.join(sizes(options))}")]
    rows += explained
    flags = remedies(phase, options, on_cpu=not torch.cuda.is_available())
    if flags and "try" not in dict(explained):
        rows.append(("try", f"reduce memory in {phase} with {', '.join(flags)}"))
    return rows


def lost(reasons: Mapping[int, str], beats: Mapping[int, Heartbeat]) -> Fault:
    """Return the fault for other ranks that are gone, with a reason for each."""
    message = "; ".join(f"{beats[rank].name} is gone: {why}" for rank, why in reasons.items())
    rows = [
        ("memory", f"rank {rank} at its last heartbeat: {beats[rank].memory}") for rank in reasons
    ]
    rows.append(("look at", _SILENT if "heartbeat" in message else _EXIT_CODES))
    return Fault(message, reasons, rows)


def stalled(where: Heartbeat) -> Fault:
    """Return the fault for this rank without progress."""
    message = f"{where.name} made no progress for {where.idle:.0f} s (--stall_timeout)"
    look_at = "the stacks above. If the work is only slow, raise --stall_timeout"
    return Fault(message, [where.rank], [("look at", look_at)])


def without_store(error: str, where: Heartbeat) -> Fault:
    """Return the fault for the end of the process that hosts the store of the ranks."""
    owner = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
    message = f"{owner}, which hosts the store of the ranks, is gone or out of reach ({error})"
    return Fault(message, [where.rank], [("look at", "what ended it, on its host")])


def is_out_of_memory(error: BaseException) -> bool:
    """True if ``error`` or a cause of it is a lack of GPU or CPU memory."""
    return bool(_OUT_OF_MEMORY.search("".join(traceback.format_exception(error))))


def is_broken_connection(error: BaseException) -> bool:
    """True if ``error`` may come from a connection that another rank closed."""
    text = "".join(traceback.format_exception(error))
    return not is_out_of_memory(error) and bool(_BROKEN_CONNECTION.search(text))


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
