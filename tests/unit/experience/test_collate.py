"""Trajectories become tensors without a look at the ids, and rows come apart and together unchanged."""

import pytest
import torch

from openppo.experience.replay_buffer import collate, idle_experience, join_rows, split_rows
from openppo.types import Experience, FinishReason

END = 2  # end of sequence, and what padding is filled with


@pytest.fixture
def batch(trajectory):
    rows = [
        trajectory([5, END, 6], [7, END], help=1.5),
        trajectory([END], [END], help=2.0),
        trajectory([END, 8], [9, 3, 3, END, 4], [1, 0, 0, 1, 1], FinishReason.LENGTH),
    ]
    rows[2].log_probs[3] = -7.0  # written by an environment: left out
    return collate(rows, END).with_fields(scores=torch.tensor([1.25, 2.0, 0.0]))


def test_fields_by_hand_though_pad_and_end_of_sequence_are_the_same_id(batch):
    found = {name: tensor.tolist() for name, tensor in batch.tensors().items()}
    assert found == {
        "sequences": [[5, 2, 6, 7, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2], [2, 8, 9, 3, 3, 2, 4]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7],
        "action_mask": [[0, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1, 1]],
        "rollout_log_probs": [[0, 0, 0, -0.875, -1, 0, 0], [0, -0.625, *[0] * 5], [0, 0, -0.75, 0, 0, -1.125, -1.25]],
        "truncated": [False, False, True],
        "weight": [1.0] * 3,
        "scores": [1.25, 2.0, 0.0],
    }
    dtypes = {"sequences": torch.int64} | dict.fromkeys(("attention_mask", "action_mask", "truncated"), torch.bool)
    assert all(tensor.dtype == dtypes.get(name, torch.float32) for name, tensor in batch.tensors().items())


def test_rows_apart_have_no_padding_and_together_are_the_same_batch(batch):
    whole = batch.with_fields(values=torch.where(batch.action_mask, torch.randn(3, 7), 0.0))
    first, second, third = split_rows(whole)
    assert [row.sequences.tolist() for row in (first, second)] == [[[5, 2, 6, 7, 2]], [[2, 2]]]
    assert (second.rollout_log_probs.tolist(), second.scores.tolist()) == ([[0.0, -0.625]], [2.0])
    assert first.sequences.untyped_storage().nbytes() == 5 * 8, "no row keeps the batch in memory"
    again = join_rows([join_rows([first, second]), third])
    assert again.tensors().keys() == whole.tensors().keys()
    for name, tensor in whole.tensors().items():
        if name == "sequences":  # padding has no meaning, so its ids may change
            tensor = torch.where(whole.attention_mask, tensor, 0)
        assert torch.equal(again.tensors()[name], tensor), name


def test_an_idle_row_has_every_field_and_no_action():
    idle = idle_experience()
    assert set(idle.tensors()) == set(Experience.__dataclass_fields__)
    assert (len(idle), idle.action_mask.any().item(), idle.attention_mask.all().item()) == (1, False, True)
    assert join_rows([idle, idle]).sequences.shape == (2, 2)
