"""What can go wrong with a rank, in words: what happened, where, and what to look at."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError

from openppo.config import mask_credentials
from openppo.strategy.watch.out_of_memory import causes, is_out_of_memory, memory_lines, remedies
from openppo.strategy.watch.peers import SILENT, Beat
from openppo.strategy.watch.stacks import stacks_of_threads


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
    lost: bool = False
    """The ranks themselves can say no more: what stacks they leave is read where the report is written."""


def raised(error: BaseException, where: Beat, options: Mapping[str, Any], models: Callable[[], Sequence[str]]) -> Fault:
    """This rank raised. Out of memory, the sizes of ``options`` and the lines of what ``models`` take are told too."""
    text = mask_credentials("".join(traceback.format_exception(error)))
    said = mask_credentials(traceback.format_exception_only(error)[-1])
    what = f"rank {where.rank} raised {said.splitlines()[0]}"
    if is_out_of_memory(error):
        memory = [*memory_lines(options), *models()]
        return Fault(what, [where], text, memory, lower=remedies(where.phase, options))
    look_at = []
    if is_consequence(error):
        look_at = ["the network between the ranks: a connection broke, and all ranks are alive"]
    elif "save_path" in options:
        look_at = [f"{options['save_path']}/logs: metrics and samples until then"]
    return Fault(what, [where], text, look_at=look_at)


def is_consequence(error: BaseException) -> bool:
    """Whether it may come from a connection that another rank has closed."""
    return not is_out_of_memory(error) and any(
        isinstance(cause, DistError) or ("gloo/transport" in str(cause) and "enforce fail" not in str(cause))
        for cause in causes(error)
    )


def lost(ranks: Mapping[int, str], beats: Mapping[int, Beat]) -> Fault:
    """Other ranks are gone: how, by rank, and what all of them said last."""
    where = [beats[rank] for rank in ranks]
    memory = [f"of rank {beat.rank} when last heard of: {beat.memory}" for beat in where if beat.memory]
    look_at = (
        "the exit code in the launcher's summary below: -11 is a crash in C code, -6 an abort, -9 SIGKILL: of a "
        "person, or of a machine without memory (dmesg tells)"
    )
    if any(SILENT in how for how in ranks.values()):
        look_at = (
            "the stacks above, if there are any: a thread that holds Python's lock silences the others. If its work is "
            "only slow, raise --heartbeat_timeout"
        )
    what = "; ".join(f"rank {rank} is gone: {how}" for rank, how in ranks.items())
    return Fault(what, where, memory=memory, look_at=[look_at], lost=True)


def stalled(where: Beat) -> Fault:
    """This rank makes no progress."""
    what = f"rank {where.rank} made no progress for {where.idle:.0f} s (--stall_timeout)"
    look_at = ["the stacks above: there its threads stand. If the work is only slow, raise --stall_timeout"]
    return Fault(what, [where], stacks_of_threads(), look_at=look_at)
