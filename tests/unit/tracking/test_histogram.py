"""Histograms count all ranks' values, however they lie on ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from openppo.tracking import histogram
from openppo.types import SingleProcess


class Ranks(SingleProcess):
    """``Comm`` of one of several ranks in one process: what the others would send is computed from their values."""

    def __init__(self, others: list[Tensor]) -> None:
        self.others, self.calls = others, 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self.calls += 1
        if op == "max":
            self.ends = tensor.clone()
            for values in self.others:
                if len(values):
                    self.ends = torch.maximum(self.ends, torch.stack((-values.min(), values.max())).double())
            return self.ends
        total = tensor.clone()
        low, high = -float(self.ends[0]), float(self.ends[1])
        for values in self.others:
            counts, _ = np.histogram(values.numpy(), bins=len(tensor) - 2, range=(low, high))
            total += torch.tensor([*counts, values.double().sum(), values.double().square().sum()])
        return total


def test_counts_are_those_of_numpy() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = histogram(values.reshape(10, 100), SingleProcess(), bins=16)
    counts, edges = np.histogram(values.numpy(), bins=16)
    assert made is not None
    assert made.counts == counts.tolist()
    assert made.edges == pytest.approx(edges.tolist())
    assert made.total == pytest.approx(float(values.sum()))
    assert made.total_of_squares == pytest.approx(float(values.square().sum()))


@pytest.mark.parametrize("cut", [0, 1, 500, 1000])
def test_it_does_not_matter_which_rank_has_which_values(cut: int) -> None:
    values = torch.randint(-50, 50, (1000,), generator=torch.Generator().manual_seed(0)).double()
    whole = histogram(values, SingleProcess(), bins=10)
    comm = Ranks([values[cut:]])
    assert histogram(values[:cut], comm, bins=10) == whole
    assert comm.calls == 2  # and both as large as the bins at most


def test_values_that_are_not_finite_are_left_out_and_nothing_at_all_is_none() -> None:
    made = histogram(torch.tensor([math.nan, 1.0, math.inf, 3.0, -math.inf]), SingleProcess(), bins=2)
    assert made is not None
    assert (made.counts, made.edges, made.total) == ([1, 1], [1.0, 2.0, 3.0], 4.0)
    assert histogram(torch.tensor([math.nan]), SingleProcess()) is None
    assert histogram(torch.zeros(0), SingleProcess()) is None


@pytest.mark.parametrize("value", [0.0, -7.0, 1e6])
def test_one_value_alone_gets_a_bar(value: float) -> None:
    made = histogram(torch.full((5,), value), SingleProcess(), bins=4)
    assert made is not None
    assert sum(made.counts) == 5
    assert made.edges[0] < value < made.edges[-1]
    assert made.edges == sorted(set(made.edges))
