"""Trajectories become tensors without a look at the ids, and rows come apart and together unchanged."""

from collections.abc import Callable

import pytest
import torch

from openppo.experience.replay_buffer import collate, idle_experience, join_rows, split_rows
from openppo.types import Experience, FinishReason, Trajectory

END = 2  # end of sequence, and what padding is filled with
Make = Callable[..., Trajectory]


@pytest.fixture
def batch(trajectory: Make) -> Experience:
    return collate(
        [
            trajectory([5, END, 6], [7, END], help=1.5),
            trajectory([END], [END], reason=FinishReason.STOP, help=2.0),
            trajectory([END, 8], [9, 3, 3, END, 4], [1, 0, 0, 1, 1], FinishReason.LENGTH),
        ],
        pad_token_id=END,
    ).with_fields(scores=torch.tensor([1.25, 2.0, 0.0]))


def test_masks_come_from_lengths_though_pad_and_end_of_sequence_are_the_same_id(batch: Experience) -> None:
    assert batch.sequences.tolist() == [[5, 2, 6, 7, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2], [2, 8, 9, 3, 3, 2, 4]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7]
    assert batch.action_mask.int().tolist() == [[0, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 1, 1]]


def test_rollout_log_probs_stay_with_their_tokens(batch: Experience) -> None:
    assert batch.rollout_log_probs.tolist() == [
        [0, 0, 0, -0.875, -1.0, 0, 0],
        [0, -0.625, 0, 0, 0, 0, 0],
        [0, 0, -0.75, 0, 0, -1.125, -1.25],
    ]


def test_a_log_prob_of_a_token_that_is_no_action_is_left_out(trajectory: Make) -> None:
    written_by_environment = trajectory([5], [6, 7], [1, 0])
    written_by_environment.log_probs[:] = [-1.0, -2.0, -3.0]
    assert collate([written_by_environment], END).rollout_log_probs.tolist() == [[0.0, -2.0, 0.0]]


def test_only_responses_cut_by_length_are_truncated(batch: Experience) -> None:
    assert batch.truncated.tolist() == [False, False, True]


def test_dtypes_are_those_of_the_legend(batch: Experience) -> None:
    dtypes = {name: tensor.dtype for name, tensor in batch.tensors().items()}
    assert dtypes == {
        "sequences": torch.int64,
        "attention_mask": torch.bool,
        "action_mask": torch.bool,
        "rollout_log_probs": torch.float32,
        "truncated": torch.bool,
        "weight": torch.float32,
        "scores": torch.float32,
    }


def test_a_row_apart_has_no_padding(batch: Experience) -> None:
    first, second, third = split_rows(batch)
    assert first.sequences.tolist() == [[5, 2, 6, 7, 2]]
    assert second.sequences.tolist() == [[2, 2]]
    assert third.sequences.tolist() == [[2, 8, 9, 3, 3, 2, 4]]
    assert second.rollout_log_probs.tolist() == [[0.0, -0.625]]
    assert [row.scores.tolist() for row in (first, second, third)] == [[1.25], [2.0], [0.0]]
    assert bool(torch.cat([row.attention_mask.flatten() for row in (first, second, third)]).all())


def test_rows_apart_and_together_are_the_same_batch(batch: Experience) -> None:
    whole = batch.with_fields(values=torch.where(batch.action_mask, torch.randn(3, 7), 0.0))
    again = join_rows(list(split_rows(whole)))
    assert again.tensors().keys() == whole.tensors().keys()
    for name, tensor in whole.tensors().items():
        if name == "sequences":  # padding has no meaning, so its ids may change
            tensor = torch.where(whole.attention_mask, tensor, 0)
        assert torch.equal(again.tensors()[name], tensor), name


def test_batches_of_different_width_are_joined(batch: Experience) -> None:
    first, second, third = split_rows(batch)
    joined = join_rows([join_rows([first, second]), third])
    assert joined.attention_mask.sum(-1).tolist() == [5, 2, 7]
    assert joined.scores.tolist() == [1.25, 2.0, 0.0]


def test_a_row_apart_does_not_keep_the_batch_in_memory(batch: Experience) -> None:
    row = next(split_rows(batch))
    assert row.sequences.untyped_storage().nbytes() == 5 * 8


def test_an_idle_row_has_every_field_and_no_action() -> None:
    idle = idle_experience()
    assert len(idle) == 1
    assert not idle.action_mask.any()
    assert set(idle.tensors()) == set(Experience.__dataclass_fields__)
    assert join_rows([idle, idle]).sequences.shape == (2, 2)
