"""Memory section of a fault report: estimated and measured bytes, and holders of the rest."""

import torch

from openppo.build.memory.estimate import Estimate, format_bytes
from openppo.strategy.fault_report import Row

_TOLERANCE = 1.25
"""Allocated over estimated bytes that still count as an estimate's error."""
_UNNOTICED = 2**29
"""Bytes that libraries may hold without being named."""


def explain_shortage(estimate: Estimate | None, phase: str) -> list[Row]:
    """Return the estimate's table, and on a GPU the bytes that exceed it."""
    if estimate is None:
        return []
    if estimate.machine.on_cpu or not torch.cuda.is_available():
        return [("memory", line) for line in estimate.table()]
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return compare(estimate, phase, allocated=torch.cuda.max_memory_allocated(), outside=outside)


def compare(estimate: Estimate, phase: str, *, allocated: int, outside: int) -> list[Row]:
    """Compare the estimate with the peak ``allocated`` by PyTorch and the bytes held ``outside`` of it."""
    expected = estimate.phases.get(phase, estimate.phases[estimate.largest])
    lines = estimate.table(verdict=False)
    lines.append(
        f"in {phase}: {format_bytes(expected)} estimated, {format_bytes(allocated)} allocated by PyTorch"
    )

    n_expected = len(lines)
    if allocated > _TOLERANCE * expected + _UNNOTICED:
        lines.append(
            f"{format_bytes(allocated - expected)} are held by something else in this process"
        )
    if outside > estimate.machine.outside + _UNNOTICED:
        lines.append(
            f"{format_bytes(outside)} of the GPU are held by other processes, or libraries of this one"
        )
    rows = [("memory", line) for line in lines]
    if len(lines) > n_expected:
        # No option of the run makes the holder of the memory smaller.
        rows.append(("try", "end what else holds the GPU's memory: nvidia-smi lists processes"))
    return rows
