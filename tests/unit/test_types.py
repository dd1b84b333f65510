"""The nouns keep their promises."""

import dataclasses

import pytest
import torch

from openppo.types import Completion, Experience, FinishReason, Prompt, SamplingParams, SingleProcess, Trajectory


def trajectory(**changes):
    """Two prompt tokens and three response tokens."""
    fields: dict = {
        "token_ids": [5, 6, 7, 8, 1],
        "action_mask": [False, False, True, True, True],
        "log_probs": [0.0, 0.0, -1.0, -2.0, -3.0],
        "versions": [-1, -1, 0, 0, 0],
        "finish_reason": FinishReason.STOP,
        "prompt": Prompt("ab", [5, 6]),
        "group": 0,
    }
    return Trajectory(**{**fields, **changes})


def experience(**changes):
    """Two rows of three tokens."""
    fields = {
        "sequences": torch.tensor([[5, 6, 1], [5, 1, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
        "action_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]).bool(),
        "rollout_log_probs": torch.zeros(2, 3),
        "scores": torch.tensor([1.0, 2.0]),
        "truncated": torch.tensor([False, True]),
    }
    return Experience(**{**fields, **changes})


def test_the_lists_of_a_trajectory_are_equally_long():
    for field in ("token_ids", "action_mask", "log_probs", "versions"):
        with pytest.raises(AssertionError, match="unequal length"):
            trajectory(**{field: getattr(trajectory(), field)[:-1]})
    assert trajectory().response_ids == [7, 8, 1]


def test_the_reasons_of_an_end_are_plain_words():
    assert [reason.value for reason in FinishReason] == ["stop", "length", "tool_call", "abort"]
    assert FinishReason("eos") is FinishReason.STOP, "older logs"
    assert [reason.value for reason in FinishReason if reason.is_complete] == ["stop", "tool_call"]


@pytest.mark.parametrize(
    "noun", [SamplingParams(3), Prompt("a", [1]), Completion([1], [0.0], FinishReason.STOP), experience()]
)
def test_what_travels_between_parts_cannot_be_changed_on_the_way(noun):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, dataclasses.fields(noun)[0].name, None)


def test_a_stage_adds_fields_to_a_copy():
    before = experience()
    after = before.with_fields(values=torch.ones(2, 3), scores=torch.zeros(2))
    assert (before.values, before.scores.tolist()) == (None, [1.0, 2.0])
    assert after.scores.tolist() == [0.0, 0.0]
    assert after.sequences is before.sequences
    set_before = ["sequences", "attention_mask", "action_mask", "rollout_log_probs", "truncated", "scores"]
    assert list(before.tensors()) == set_before
    assert after.tensors().keys() == {*set_before, "values"}
    assert len(after) == 2


def test_an_experience_moves_with_all_its_fields():
    moved = experience(values=torch.ones(2, 3)).to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert (moved.values is None, moved.log_probs) == (False, None)


def test_a_program_without_process_group_is_its_own_rank_0():
    comm, tensor = SingleProcess(), torch.tensor([1.0])
    reduced = comm.all_reduce(tensor, "max")
    reduced += 1
    assert tensor.tolist() == [1.0], "the result is a new tensor"
    assert (comm.rank, comm.world_size, comm.all_gather_object("x")) == (0, 1, ["x"])
