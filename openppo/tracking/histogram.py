"""How values are distributed over all ranks, in equally wide bins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.types import Comm

BINS = 64


@dataclass(frozen=True)
class Histogram:
    """Counts of finite values: bin i holds those from ``edges[i]`` to ``edges[i + 1]``, the last one its end too."""

    edges: list[float]
    """One more than ``counts``, rising."""
    counts: list[int]
    total: float
    """Sum of the values."""
    total_of_squares: float


def histogram(values: Tensor, comm: Comm, bins: int = BINS) -> Histogram | None:
    """Of the finite elements of all ranks' ``values`` (any shape), None where there are none.

    The bins reach from the smallest to the largest, so the counts do not depend on how values lie on ranks. What ranks
    send is as large as the bins, whatever the number of values. All ranks call this together.
    """
    finite = values.detach().flatten().double().cpu()
    finite = finite[finite.isfinite()]
    ends = torch.stack((-finite.min(), finite.max())) if len(finite) else torch.full((2,), -torch.inf).double()
    ends = comm.all_reduce(ends, "max")
    if not ends.isfinite().all():
        return None
    low, high = -float(ends[0]), float(ends[1])
    if low == high:
        spread = max(abs(low), 1.0) * 1e-3  # a bar around the one value
        low, high = low - spread, high + spread
    counts = torch.histc(finite, bins, low, high)  # counts in float64 are exact
    sums = comm.all_reduce(torch.cat((counts, finite.sum()[None], finite.square().sum()[None])))
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    return Histogram(edges.tolist(), [int(n) for n in sums[:bins]], float(sums[bins]), float(sums[bins + 1]))
