"""Lists of ids become padded tensors; the mask comes from the lengths."""

import itertools
import math
import random

import pytest
import torch

from openppo.models.padding import MicroBatchSize, micro_batches, pad_right, rounded_width, split_overhead


def test_rows_are_padded_on_the_right_to_the_longest():
    sequences, mask = pad_right([[5, 6, 7], [8], []], pad_token_id=9)
    assert sequences.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert (sequences.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_a_token_that_equals_pad_is_still_real():
    sequences, mask = pad_right([[9, 5, 9], [5, 9]], pad_token_id=9)
    assert sequences.tolist() == [[9, 5, 9], [5, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, True, False]]


def test_micro_batches_hold_neighbours_in_length_and_no_more_than_fit():
    lengths = [5, 9, 2, 2, 7, 1]
    assert micro_batches(lengths, MicroBatchSize(rows=4)) == [[1, 4, 0], [2, 3, 5]]
    assert micro_batches(lengths, MicroBatchSize(rows=1)) == [[1], [4], [0], [2], [3], [5]]
    assert micro_batches(lengths, MicroBatchSize(rows=1, tokens=14)) == [[1], [4], [0], [2, 3, 5]]
    assert micro_batches(lengths, MicroBatchSize(rows=4, tokens=3)) == [[1], [4], [0], [2], [3], [5]], (
        "none is left out"
    )
    assert micro_batches([6, 6, 6], MicroBatchSize(rows=2)) == [[0, 1], [2]], "full ones first"
    assert micro_batches([], MicroBatchSize(rows=4)) == []


def every_cut(n):
    """All ways to cut ``n`` sequences into neighbouring batches, by their sizes."""
    for signs in itertools.product((False, True), repeat=n - 1):
        bounds = [0, *(place for place, cut in enumerate(signs, start=1) if cut), n]
        yield [end - start for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("tokens", [None, 40])
def test_no_other_cut_of_the_sorted_sequences_pads_less_by_more_than_its_batches_cost(tokens):
    def cost(sizes, ordered, rows):
        places = itertools.accumulate(sizes[:-1], initial=0)
        areas = [n * ordered[place] for n, place in zip(sizes, places, strict=True)]
        fit = [n <= rows if tokens is None else n == 1 or area <= tokens for n, area in zip(sizes, areas, strict=True)]
        full = rows * ordered[0] if tokens is None else tokens
        return sum(areas) + len(sizes) * full / 8 if all(fit) else math.inf

    rng = random.Random(3)
    for _ in range(50):
        lengths, rows = [round(rng.expovariate(1 / 9)) + 1 for _ in range(8)], rng.randint(1, 8)
        ordered = sorted(lengths, reverse=True)
        found = micro_batches(lengths, MicroBatchSize(rows, tokens))
        assert [lengths[i] for batch in found for i in batch] == ordered
        assert cost([len(b) for b in found], ordered, rows) == min(cost(cut, ordered, rows) for cut in every_cut(8))


@pytest.mark.parametrize("seed", range(20))
def test_under_zero_3_there_are_as_few_batches_as_possible(seed):
    rng = random.Random(seed)
    lengths = [int(rng.expovariate(1 / 30)) + 1 for _ in range(rng.randint(1, 60))]
    batches = micro_batches(lengths, MicroBatchSize(8, overhead=split_overhead(3)))
    assert len(batches) == -(-len(lengths) // 8)
    assert len(micro_batches(lengths, MicroBatchSize(8, overhead=split_overhead(2)))) >= len(batches)


def test_few_widths_hold_all_lengths_with_little_padding():
    widths = {length: rounded_width(length) for length in range(1, 4097)}
    assert all(width % 8 == 0 and 0 <= width - length <= max(7, length / 16) for length, width in widths.items())
    assert len({width for length, width in widths.items() if 128 <= length < 1024}) <= 49
