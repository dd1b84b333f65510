"""Metrics, moments and histograms that reduce over micro-batches and ranks.

A result depends on the samples, never on how they were split: of each addition ``(weight, value, m2)`` is kept,
``m2`` the weighted sum of squared distances from the mean, and such triples merge exactly (Chan, Golub and LeVeque,
Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from openppo.types import Comm

Reduction: TypeAlias = Literal["mean", "sum", "max", "min", "std"]


@dataclass
class Moments:
    """Number, mean and sum of squared deviations of values."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Tensor, comm: Comm) -> Moments:
        """Moments of all ranks' ``values`` (n,), in float64; n may differ and be 0. Collective."""
        values = values.detach().double().cpu()
        count = float(comm.all_reduce(torch.tensor(float(len(values)), dtype=torch.float64)))
        mean = float(comm.all_reduce(values.sum())) / max(count, 1.0)
        return cls(count, mean, float(comm.all_reduce((values - mean).square().sum())))

    def merge(self, other: Moments) -> None:
        """Take in the values of ``other``."""
        total, shift = self.count + other.count, other.mean - self.mean
        if total > 0:
            self.squares += other.squares + shift**2 * self.count * other.count / total
            self.mean += shift * other.count / total
            self.count = total

    @property
    def variance(self) -> float:
        """The biased variance."""
        return self.squares / max(self.count, 1.0)


class Metrics:
    """A bag of named metrics. Additions stay on their device until ``reduced``, so none waits for the GPU."""

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
        self._pieces[name].append(
            torch.stack((value.new_tensor(weight), value.reshape(()), value.new_zeros(())))
        )

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
        count, m2 = inside.sum().to(torch.float64), values.new_zeros(())
        if reduce in ("max", "min"):
            worst = -math.inf if reduce == "max" else math.inf
            value = getattr(values.masked_fill(~inside, worst), reduce)()
        else:
            value = values.masked_fill(~inside, 0.0).sum()
        if reduce in ("mean", "std"):
            value = value / count.clamp(min=1)
            m2 = (values - value).masked_fill(~inside, 0.0).square().sum()
        self._pieces[name].append(torch.stack((count, value, m2)))

    def reduced(self, comm: Comm) -> dict[str, float]:
        """All metrics over all micro-batches and ranks, in the order of first addition; the same on every rank.

        Collective: every rank must call it. A metric to which nothing was added anywhere is left out.
        """
        state = {
            name: (self._reductions[name], _merge(self._reductions[name], p))
            for name, p in self._pieces.items()
        }
        triples: dict[str, list[Tensor]] = {}
        reductions: dict[str, Reduction] = {}
        for of_rank in comm.all_gather_object(state):
            for name, (reduction, triple) in of_rank.items():
                reductions[name] = reduction
                triples.setdefault(name, []).append(torch.tensor(triple, dtype=torch.float64))
        result = {}
        for name, pieces in triples.items():
            weight, value, m2 = _merge(reductions[name], pieces)
            if weight > 0:
                result[name] = math.sqrt(m2 / weight) if reductions[name] == "std" else value
        return result

    def merge(self, other: Metrics) -> None:
        """Take in the additions of ``other``, after those that are here."""
        for name, pieces in other._pieces.items():
            self._declare(name, other._reductions[name])
            self._pieces[name] += pieces

    def _declare(self, name: str, reduction: Reduction) -> None:
        self._pieces.setdefault(name, [])
        if (before := self._reductions.setdefault(name, reduction)) != reduction:
            raise ValueError(
                f"metric {name} was declared with reduction {before}, now with {reduction}"
            )


def _merge(reduction: Reduction, pieces: list[Tensor]) -> list[float]:
    """One triple ``[weight, value, m2]`` that stands for all ``pieces``; weight 0 when they hold nothing."""
    devices = dict.fromkeys(piece.device for piece in pieces)  # one transfer for each
    rows = [
        torch.stack([piece for piece in pieces if piece.device == device]).cpu()
        for device in devices
    ]
    stacked = torch.cat([torch.zeros(0, 3, dtype=torch.float64), *rows])  # (pieces, 3)
    weights, values, m2s = stacked[stacked[:, 0] > 0].unbind(dim=1)
    if len(weights) == 0:
        return [0.0, 0.0, 0.0]
    weight = weights.sum()
    if reduction in ("sum", "max", "min"):
        return [float(weight), float(getattr(values, reduction)()), 0.0]
    value = (weights * values).sum() / weight
    return [float(weight), float(value), float((m2s + weights * (values - value).square()).sum())]


BINS = 64


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
    """Distribution of the finite elements of all ranks' ``values`` (any shape); None without any.

    Bins reach from the smallest to the largest value, so counts do not depend on the split over ranks, and ranks send
    no more than the bins. Collective.
    """
    finite = values.detach().flatten().double().cpu()
    finite = finite[finite.isfinite()]
    ends = (
        torch.stack((-finite.min(), finite.max()))
        if len(finite)
        else torch.full((2,), -torch.inf).double()
    )
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
    return Histogram(
        edges.tolist(),
        [int(n) for n in sums[:bins]],
        float(sums[bins]),
        total_of_squares=float(sums[bins + 1]),
    )
