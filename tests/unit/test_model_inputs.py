"""Inputs of models keep ids, masks, images and positions together."""

import pytest
import torch

from openppo.media import MediaItem, TokenIds
from openppo.types import ModelInputs

IMAGE = 9
ONE, OTHER = (MediaItem({}, IMAGE, n_tokens=2, key=key) for key in (1, 2))
TEXT = TokenIds([5, 6, 7, 8])
SHOWN = TokenIds([5, IMAGE, IMAGE], (ONE,))


def test_rows_are_padded_on_the_right_and_masks_come_from_lengths() -> None:
    inputs = ModelInputs.of_ids([[5, 0], [5, 6, 0]], pad_token_id=0)
    assert inputs.sequences.tolist() == [[5, 0, 0], [5, 6, 0]]
    assert inputs.attention_mask.tolist() == [[True, True, False], [True, True, True]]
    assert (inputs.lengths, len(inputs), inputs.sequences.dtype) == ([2, 3], 2, torch.int64)


def test_the_rows_of_a_batch_joined_again_are_the_batch() -> None:
    batch = ModelInputs.of([TEXT, SHOWN], pad_token_id=0)
    rows = list(batch.rows())
    assert [row.sequences.shape for row in rows] == [(1, 4), (1, 3)]
    assert [row.media for row in rows] == [((),), ((ONE,),)]

    again = ModelInputs.join(rows)
    assert torch.equal(again.sequences, batch.sequences)
    assert torch.equal(again.attention_mask, batch.attention_mask)
    assert again.media == batch.media == ((), (ONE,))


def test_rows_do_not_keep_their_batch_in_memory() -> None:
    batch = ModelInputs.of([TEXT, SHOWN], pad_token_id=0)
    batch_storage = batch.sequences.untyped_storage().data_ptr()
    for row in batch.rows():
        assert row.sequences.untyped_storage().data_ptr() != batch_storage


def test_images_stay_with_their_rows_beside_batches_of_texts() -> None:
    texts = ModelInputs.of([TEXT, TEXT], pad_token_id=0)
    assert texts.media == ()
    both = ModelInputs.join([texts, ModelInputs.of([SHOWN], pad_token_id=0)])
    assert both.media == ((), (), (ONE,))


def test_equal_ids_with_other_images_are_distinct_rows() -> None:
    other = TokenIds(SHOWN.token_ids, (OTHER,))
    inputs = ModelInputs.of([SHOWN, other, TEXT], pad_token_id=0)
    assert inputs.distinct_rows == [[5, -2, -2], [5, -3, -3], [5, 6, 7, 8]]


def test_every_tensor_moves() -> None:
    inputs = ModelInputs.of([TEXT], pad_token_id=0)
    packed = ModelInputs(inputs.sequences, inputs.attention_mask, position_ids=inputs.sequences)
    moved = packed.to("meta")
    assert moved.position_ids is not None
    assert moved.sequences.is_meta and moved.attention_mask.is_meta and moved.position_ids.is_meta


def test_packed_documents_are_not_padded_or_split() -> None:
    inputs = ModelInputs.of([TEXT], pad_token_id=0)
    packed = ModelInputs(inputs.sequences, inputs.attention_mask, position_ids=inputs.sequences)
    with pytest.raises(AssertionError, match="packed documents"):
        packed.widened(8)
    with pytest.raises(AssertionError, match="packed documents"):
        next(packed.rows())
