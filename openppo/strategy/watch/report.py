"""The one report of a run that cannot go on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from openppo.strategy.watch.faults import Fault
from openppo.strategy.watch.peers import Beat
from openppo.strategy.watch.stacks import written_stacks

_WIDTH = 100


def render(fault: Fault, others: Sequence[Beat], resume: str) -> str:
    """The report; ``others`` are the ranks that are well. Lost ranks that still run are made to write their stacks."""
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
    stacks = {beat.rank: written_stacks(beat) for beat in fault.where} if fault.lost else {}
    details = fault.details + "".join(f"Stacks of rank {rank}:\n{text}\n" for rank, text in stacks.items() if text)
    details = f"{details.rstrip()}\n\n" if details else ""
    return f"\n{title:=^{_WIDTH}}\n{details}{text}{'':=^{_WIDTH}}\n"


def _restart() -> str:
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return f"torchrun starts all ranks again (restart {done + 1} of {most})" if done < most else ""
