"""Lists of ids become padded tensors; the mask comes from the lengths."""

from __future__ import annotations

import pytest
import torch

from openppo.models.padding import micro_batches, pad_right


def test_rows_are_padded_on_the_right_to_the_longest() -> None:
    sequences, mask = pad_right([[5, 6, 7], [8], []], pad_token_id=9)
    assert sequences.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False], [False, False, False]]
    assert (sequences.dtype, mask.dtype) == (torch.int64, torch.bool)


def test_a_token_that_equals_pad_is_still_real() -> None:
    sequences, mask = pad_right([[9, 5, 9], [5, 9]], pad_token_id=9)
    assert sequences.tolist() == [[9, 5, 9], [5, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize("rows", [[[1]], [[1, 2], [3, 4]]])
def test_rows_of_equal_length_get_no_padding(rows: list[list[int]]) -> None:
    sequences, mask = pad_right(rows, pad_token_id=0)
    assert sequences.tolist() == rows
    assert bool(mask.all())


def test_micro_batches_hold_neighbours_in_length_and_no_more_than_fit() -> None:
    lengths = [5, 9, 2, 2, 7, 1]
    assert micro_batches(lengths, rows=4) == [[1, 4, 0, 2], [3, 5]]
    assert micro_batches(lengths, rows=1) == [[1], [4], [0], [2], [3], [5]]
    assert micro_batches(lengths, rows=1, tokens=14) == [[1], [4, 0], [2, 3, 5]]
    assert micro_batches(lengths, rows=4, tokens=3) == [[1], [4], [0], [2], [3], [5]], "none is left out"
    assert micro_batches([], rows=4) == []
