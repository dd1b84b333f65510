"""Metrics and histograms depend on the samples, not on their split over micro-batches and ranks."""

import math
import statistics

import numpy as np
import pytest
import torch

from openppo.tracking import Metrics, Moments, histogram
from openppo.types import SingleProcess
from tests.ranks import on_ranks


def reduced_on_all(bags: list[Metrics]) -> list[dict[str, float]]:
    return on_ranks(len(bags), lambda comm: bags[comm.rank].reduced(comm))


NUMBERS = [3.0, -1.5, 0.25, 8.0, 8.0, -2.0, 100.5]
# all numbers on one rank at once; one by one; over three ranks, one of them with nothing
SPLITS = [
    [[NUMBERS]],
    [[[number] for number in NUMBERS]],
    [[NUMBERS[:1], NUMBERS[1:4]], [], [NUMBERS[4:]]],
]
EXPECTED = {
    "mean": statistics.fmean(NUMBERS),
    "std": statistics.pstdev(NUMBERS),
    "max": 100.5,
    "min": -2.0,
}
EXPECTED["sum"] = math.fsum(NUMBERS)
NORMAL = statistics.NormalDist().inv_cdf(0.975)
EXPECTED["ci95"] = NORMAL * statistics.stdev(NUMBERS) / len(NUMBERS) ** 0.5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("reduction", EXPECTED)
def test_tensor_elements_reduce_alike_for_every_split(split, reduction):
    bags = [Metrics() for _ in split]
    for bag, micro_batches in zip(bags, split, strict=True):
        for numbers in micro_batches:
            bag.add_tensor("x", torch.tensor(numbers), reduce=reduction)
            for number in numbers:
                bag.add("one by one", number, reduce=reduction)
    for result in reduced_on_all(bags):
        assert result == dict.fromkeys(
            ("x", "one by one"), pytest.approx(EXPECTED[reduction], rel=1e-12)
        )


@pytest.mark.parametrize("reduction", EXPECTED)
def test_nan_shows_inside_the_mask_only(reduction):
    values = torch.tensor([[1.0, math.nan, 4.0], [math.inf, 7.0, math.nan]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    metrics = Metrics()
    metrics.add_tensor("x", values, mask, reduce=reduction)
    metrics.add_tensor("bad", torch.tensor([1.0, math.nan]), reduce=reduction)
    metrics.add_tensor("bad", torch.tensor([2.0, 3.0]), reduce=reduction)
    inside = [1.0, 4.0, 7.0]
    expected = {"mean": 4.0, "std": statistics.pstdev(inside), "max": 7.0, "min": 1.0, "sum": 12.0}
    expected["ci95"] = NORMAL * 3.0 / 3**0.5  # 1, 4, 7 lie 3 apart
    found = metrics.reduced(SingleProcess())
    assert found["x"] == pytest.approx(expected[reduction])
    assert math.isnan(found["bad"])


def test_a_metric_of_nothing_is_left_out_and_numbers_are_exact():
    metrics, parameter = Metrics(), torch.ones(3, requires_grad=True)
    metrics.add("dummy_forward", math.nan, weight=0)
    metrics.add("loss", math.nan, weight=0)
    metrics.add("loss", parameter.sum(), weight=5)
    metrics.add_tensor(
        "all_masked", torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), reduce="max"
    )
    metrics.add_tensor("empty", torch.ones(0), reduce="std")
    metrics.add_tensor("clipped", torch.tensor([True, False, False, True]))
    metrics.add_tensor("big", torch.full((4099,), 1.0, dtype=torch.bfloat16), reduce="sum")
    metrics.add("lr", 1e-6 / 3)
    for offset in (
        [0.0, 1.0],
        [2.0],
        [3.0, 4.0],
    ):  # sum of squares minus squared sum would give 0 or a NaN here
        metrics.add_tensor("far", torch.tensor(offset, dtype=torch.float64) + 1e9, reduce="std")
    expected = {"loss": 3.0, "clipped": 0.5, "big": 4099.0, "lr": 1e-6 / 3}
    assert not any(piece.requires_grad for pieces in metrics._pieces.values() for piece in pieces)
    for _ in range(2):
        found = metrics.reduced(SingleProcess())
        assert found.pop("far") == pytest.approx(math.sqrt(2.0), rel=1e-9), (
            "digits are kept far from zero"
        )
        assert found == expected


def test_ranks_that_lack_names_get_the_same_dict_in_the_same_order():
    bags = [Metrics(), Metrics(), Metrics()]
    bags[0].add("b", 1.0)
    bags[0].add("a", torch.tensor(2.0), weight=1)
    bags[1].add("c", 3.0, reduce="max")
    bags[1].add("a", 4.0, weight=3)
    assert [list(result.items()) for result in reduced_on_all(bags)] == [
        [("b", 1.0), ("a", 3.5), ("c", 3.0)]
    ] * 3
    for add in (lambda: bags[1].add("c", 1.0), lambda: bags[1].add_tensor("c", torch.ones(2))):
        with pytest.raises(ValueError, match="c was declared with reduction max, now with mean"):
            add()


def test_histogram_counts_are_those_of_numpy_whatever_the_ranks():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = histogram(values.reshape(10, 100), SingleProcess(), bins=16)
    assert made is not None
    for cut in (0, 1, 500, 1000):
        parts = values[:cut], values[cut:]
        for found in on_ranks(
            2, lambda comm, parts=parts: histogram(parts[comm.rank], comm, bins=16)
        ):
            assert (found.edges, found.counts) == (made.edges, made.counts)
    counts, edges = np.histogram(values.numpy(), bins=16)
    assert (made.counts, made.edges) == (counts.tolist(), pytest.approx(edges.tolist()))
    assert (made.total, made.total_of_squares) == pytest.approx(
        (float(values.sum()), float(values.square().sum()))
    )


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([math.nan, 1.0, math.inf, 3.0, -math.inf], [1, 1]),
        ([math.nan], None),
        ([], None),
        *(
            ([value] * 5, [0, 5]) for value in (0.0, -7.0, 1e6)
        ),  # one value alone gets a bar around it
    ],
)
def test_a_histogram_is_of_finite_values(values, counts):
    made = histogram(torch.tensor(values), SingleProcess(), bins=2)
    assert (None if made is None else made.counts) == counts
    if made is not None:
        finite = [value for value in values if math.isfinite(value)]
        assert made.edges[0] <= min(finite) <= max(finite) <= made.edges[-1]
        assert made.edges == sorted(set(made.edges))
        assert made.total == sum(finite)


@pytest.mark.parametrize("split", SPLITS)
def test_moments_of_parts_merge_into_those_of_all(split):
    whole = Moments()
    for numbers in [numbers for of_rank in split for numbers in [*of_rank, []]]:
        whole.merge(Moments.of(torch.tensor(numbers), SingleProcess()))
    expected = len(NUMBERS), EXPECTED["mean"], EXPECTED["std"] ** 2
    assert (whole.count, whole.mean, whole.variance) == pytest.approx(expected, rel=1e-12)


def test_one_value_has_no_interval():
    metrics = Metrics()
    metrics.add("x", 1.0, reduce="ci95")
    assert metrics.reduced(SingleProcess()) == {}
    metrics.add("x", 3.0, reduce="ci95")
    # two values, 1 and 3: variance 2, standard error 1
    assert metrics.reduced(SingleProcess()) == {"x": pytest.approx(1.959964, abs=1e-6)}
