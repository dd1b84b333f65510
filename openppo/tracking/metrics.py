"""Metrics, moments and histograms that reduce over micro-batches and ranks.

A result depends on the samples, never on how they were split. Each addition is kept as ``(weight, value, m2)``, ``m2``
the weighted sum of squared distances from the mean; such triples merge exactly (Chan, Golub and LeVeque, Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from openppo.types import Comm

Reduction: TypeAlias = Literal["mean", "sum", "max", "min", "std", "ci95"]
"""``ci95`` is half the width of the 95 % interval of the mean of independent values, by the normal distribution."""
_95_PERCENT = 1.959963984540054
"""Quantile 0.975 of the normal distribution."""


@dataclass
class Moments:
    """Number, mean and sum of squared deviations of values."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, comm: Comm) -> Moments:
        """Return the moments of all ranks' ``values`` (n,), in float64; n may differ and be 0. Collective."""
        values = values.detach().double().cpu()
        n = torch.tensor(float(len(values)), dtype=torch.float64)
        count = float(comm.all_reduce(n))
        mean = float(comm.all_reduce(values.sum())) / max(count, 1.0)
        squares = comm.all_reduce((values - mean).square().sum())
        return cls(count, mean, float(squares))

    def merge(self, other: Moments) -> None:
        """Add the values of ``other``."""
        total = self.count + other.count
        shift = other.mean - self.mean
        if total > 0:
            self.squares += other.squares + shift**2 * self.count * other.count / total
            self.mean += shift * other.count / total
            self.count = total

    @property
    def variance(self) -> float:
        """The biased variance."""
        return self.squares / max(self.count, 1.0)


class Metrics:
    """Named metrics. Additions stay on their device until ``reduced``, so none waits for the GPU."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._pieces: dict[str, list[Tensor]] = {}  # each (3,) float64: weight, value, m2

    def add(
        self, name: str, value: float | Tensor, *, weight: float = 1.0, reduce: Reduction = "mean"
    ) -> None:
        """Add one number. ``weight`` counts in mean and std; an addition of weight 0 adds nothing at all."""
        assert weight >= 0, f"{name}: negative weight {weight}"
        self._declare(name, reduce)
        if weight == 0:
            return

        value = torch.as_tensor(value, dtype=torch.float64).detach()
        assert value.numel() == 1, (
            f"{name}: one number expected, got shape {tuple(value.shape)}; see add_tensor"
        )
        m2 = value.new_zeros(())
        piece = torch.stack((value.new_tensor(weight), value.reshape(()), m2))
        self._pieces[name].append(piece)

    def add_tensor(
        self, name: str, values: Tensor, mask: Tensor | None = None, reduce: Reduction = "mean"
    ) -> None:
        """Add all elements of ``values`` where ``mask`` (of the same shape) is true; the others may be NaN."""
        self._declare(name, reduce)
        assert mask is None or mask.shape == values.shape, (
            f"{name}: {values.shape} values, {mask.shape} mask"
        )
        if values.numel() == 0:
            return

        values = values.detach().to(torch.float64)
        inside = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
        count = inside.sum().to(torch.float64)
        m2 = values.new_zeros(())
        if reduce in ("max", "min"):
            worst = -math.inf if reduce == "max" else math.inf
            value = getattr(values.masked_fill(~inside, worst), reduce)()
        else:
            value = values.masked_fill(~inside, 0.0).sum()
        if reduce in ("mean", "std", "ci95"):
            value = value / count.clamp(min=1)
            m2 = (values - value).masked_fill(~inside, 0.0).square().sum()
        self._pieces[name].append(torch.stack((count, value, m2)))

    def reduced(self, comm: Comm) -> dict[str, float]:
        """Reduce all metrics over all micro-batches and ranks, in the order of first addition; the same on every rank.

        Collective: every rank must call it. A metric to which nothing was added anywhere is left out.
        """
        merged = {}
        for name, pieces in self._pieces.items():
            reduction = self._reductions[name]
            merged[name] = (reduction, _merge(reduction, pieces))

        triples: dict[str, list[Tensor]] = {}
        reductions: dict[str, Reduction] = {}
        for rank_metrics in comm.all_gather_object(merged):
            for name, (reduction, triple) in rank_metrics.items():
                reductions[name] = reduction
                piece = torch.tensor(triple, dtype=torch.float64)
                triples.setdefault(name, []).append(piece)

        result = {}
        for name, pieces in triples.items():
            weight, value, m2 = _merge(reductions[name], pieces)
            if reductions[name] == "ci95":
                if weight > 1:
                    result[name] = _95_PERCENT * math.sqrt(m2 / (weight - 1) / weight)
            elif weight > 0:
                result[name] = math.sqrt(m2 / weight) if reductions[name] == "std" else value
        return result

    def merge(self, other: Metrics) -> None:
        """Append the additions of ``other``."""
        for name, pieces in other._pieces.items():
            self._declare(name, other._reductions[name])
            self._pieces[name] += pieces

    def _declare(self, name: str, reduction: Reduction) -> None:
        self._pieces.setdefault(name, [])
        before = self._reductions.setdefault(name, reduction)
        if before != reduction:
            raise ValueError(
                f"metric {name} was declared with reduction {before}, now with {reduction}"
            )


def _merge(reduction: Reduction, pieces: list[Tensor]) -> list[float]:
    """Merge ``pieces`` into one triple ``[weight, value, m2]``; weight 0 if they hold nothing."""
    by_device: dict[torch.device, list[Tensor]] = {}  # one transfer for each device
    for piece in pieces:
        by_device.setdefault(piece.device, []).append(piece)
    rows = [torch.stack(on_device).cpu() for on_device in by_device.values()]
    empty = torch.zeros(0, 3, dtype=torch.float64)
    triples = torch.cat([empty, *rows])  # (pieces, 3)

    weights, values, m2s = triples[triples[:, 0] > 0].unbind(dim=1)
    if len(weights) == 0:
        return [0.0, 0.0, 0.0]

    weight = weights.sum()
    if reduction in ("sum", "max", "min"):
        return [float(weight), float(getattr(values, reduction)()), 0.0]
    value = (weights * values).sum() / weight
    m2 = (m2s + weights * (values - value).square()).sum()
    return [float(weight), float(value), float(m2)]


BINS = 64
"""Default number of bins of a histogram."""


@dataclass(frozen=True)
class Histogram:
    """Counts of finite values in equally wide bins: bin i reaches from ``edges[i]`` to ``edges[i + 1]``."""

    edges: list[float]
    """One more than ``counts``, rising; the last bin includes its end."""
    counts: list[int]
    total: float
    """Sum of the values."""
    total_of_squares: float


def histogram(values: Tensor, comm: Comm, bins: int = BINS) -> Histogram | None:
    """Count the finite elements of all ranks' ``values`` (any shape) in bins; None without any.

    Bins reach from the smallest to the largest value, so counts do not depend on the split over ranks, and ranks send
    no more than the bins. Collective.
    """
    finite = values.detach().flatten().double().cpu()
    finite = finite[finite.isfinite()]

    ends = torch.full((2,), -torch.inf).double()
    if len(finite):
        ends = torch.stack((-finite.min(), finite.max()))
    ends = comm.all_reduce(ends, "max")
    if not ends.isfinite().all():
        return None
    low = -float(ends[0])
    high = float(ends[1])
    if low == high:
        spread = max(abs(low), 1.0) * 1e-3  # a bar around the one value
        low -= spread
        high += spread

    counts = torch.histc(finite, bins, low, high)  # counts in float64 are exact
    totals = torch.stack((finite.sum(), finite.square().sum()))
    sums = comm.all_reduce(torch.cat((counts, totals)))
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    return Histogram(
        edges=edges.tolist(),
        counts=[int(n) for n in sums[:bins]],
        total=float(sums[bins]),
        total_of_squares=float(sums[bins + 1]),
    )
