"""Documents become micro-batches: masks from lengths, every rank equally many, tokens counted over all."""

import pytest
import torch

from openppo.datasets import TokenExample
from openppo.trainer.supervised.batches import equal_micro_batches, token_batch
from openppo.types import SingleProcess

PAD = 9


def example(*ids, first=1):
    """Targets are the tokens from ``first`` on."""
    return TokenExample(list(ids), [t >= first for t in range(len(ids))])


def test_tensors_are_padded_on_the_right_and_masks_come_from_lengths():
    batch = token_batch([example(4, PAD, 5, first=2), example(PAD, PAD)], 2, PAD, SingleProcess())
    [(sequences, attention_mask, loss_mask, position_ids)] = batch.micro_batches
    assert sequences.tolist() == [[4, PAD, 5], [PAD, PAD, PAD]]
    assert attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert loss_mask.tolist() == [[False, False, True], [False, True, False]]
    assert (sequences.dtype, attention_mask.dtype, loss_mask.dtype) == (torch.int64, torch.bool, torch.bool)
    assert position_ids is None


def test_packed_rows_start_anew_at_each_document_and_padding_goes_on():
    examples = [example(1, 2, 3, first=0), example(4, 5, first=0), example(6, 7)]
    batch = token_batch(examples, 2, PAD, SingleProcess(), pack_to=6)
    [(sequences, attention_mask, loss_mask, position_ids)] = batch.micro_batches
    assert sequences.tolist() == [[1, 2, 3, 4, 5], [6, 7, PAD, PAD, PAD]]
    assert attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert loss_mask.int().tolist() == [[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]  # no document's first token
    assert position_ids is not None
    assert position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.n_targets == 4


@pytest.mark.parametrize("pack_to", [None, 6])
def test_examples_without_a_target_are_left_out(pack_to):
    examples = [example(1), example(2, first=0), example(3, 4, 5, first=3), example(6, 7)]
    batch = token_batch(examples, 1, PAD, SingleProcess(), pack_to)
    assert [micro.sequences.tolist() for micro in batch.micro_batches] == [[[6, 7]]]
    only_prompts = token_batch(examples[:3], 1, PAD, SingleProcess(), pack_to)
    assert (len(only_prompts.micro_batches), only_prompts.n_targets) == (1, 0)


@pytest.mark.parametrize("pack_to", [None, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 3, 10])
def test_every_example_is_used_once_in_equally_many_micro_batches(world_size, micro, pack_to, rank_of):
    examples = [example(*range(number, number + 2 + number % 3), first=0) for number in range(0, 70, 10)]  # 19 tokens
    batches = [token_batch(examples, micro, PAD, rank_of(rank, world_size), pack_to) for rank in range(world_size)]
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert {batch.n_targets for batch in batches} == {sum(len(e.token_ids) - 1 for e in examples)}
    tensors = [micro_batch for batch in batches for micro_batch in batch.micro_batches]
    targets = [token for m in tensors for token in m.sequences[m.loss_mask].tolist()]
    assert sorted(targets) == sorted(token for e in examples for token in e.token_ids[1:])
    assert max(len(m.sequences) for m in tensors) <= micro
    assert pack_to is None or all(m.position_ids.shape == m.sequences.shape for m in tensors)


def test_micro_batches_keep_the_order_of_the_examples():
    assert equal_micro_batches(list("abcde"), 2, SingleProcess()) == [["a", "b"], ["c", "d"], ["e"]]
    assert equal_micro_batches([], 2, SingleProcess()) == [[]]
