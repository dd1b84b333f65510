"""The nouns keep their promises."""

import dataclasses

import pytest
import torch

from openppo.types import (
    Completion,
    Experience,
    FinishReason,
    ModelInputs,
    Prompt,
    SamplingParams,
    SingleProcess,
    Trajectory,
)

EXPERIENCE = Experience(
    ModelInputs.of_ids([[5, 6, 1], [5, 1]], pad_token_id=0),
    action_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]).bool(),
    rollout_log_probs=torch.zeros(2, 3),
    scores=torch.tensor([1.0, 2.0]),
    truncated=torch.tensor([False, True]),
)


def test_the_lists_of_a_trajectory_are_equally_long():
    lists = {
        "token_ids": [5, 6, 7],
        "action_mask": [False, True, True],
        "log_probs": [0.0, -1.0, -2.0],
    }
    lists["versions"] = [-1, 0, 0]
    rest = {"finish_reason": FinishReason.STOP, "prompt": Prompt("a", [5]), "group": 0}
    assert Trajectory(**lists, **rest).response_ids == [6, 7]
    for name, values in lists.items():
        with pytest.raises(AssertionError, match="unequal length"):
            Trajectory(**(lists | {name: values[:-1]}), **rest)


def test_the_reasons_of_an_end_are_plain_words():
    assert [reason.value for reason in FinishReason] == ["stop", "length", "tool_call", "abort"]
    assert [reason.value for reason in FinishReason if reason.is_complete] == ["stop", "tool_call"]


@pytest.mark.parametrize(
    "noun",
    [
        SamplingParams(3),
        Prompt("a", [1]),
        Completion([1], [0.0], [0], FinishReason.STOP),
        EXPERIENCE,
    ],
)
def test_what_travels_between_parts_cannot_be_changed_on_the_way(noun):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, dataclasses.fields(noun)[0].name, None)


def test_a_stage_adds_fields_to_a_copy_which_moves_as_a_whole():
    after = EXPERIENCE.with_fields(values=torch.ones(2, 3), scores=torch.zeros(2))
    assert (EXPERIENCE.values, EXPERIENCE.scores.tolist(), len(after)) == (None, [1.0, 2.0], 2)
    assert after.scores.tolist() == [0.0, 0.0]
    assert after.inputs is EXPERIENCE.inputs
    assert after.tensors().keys() == {*EXPERIENCE.tensors(), "values"}
    moved = after.to("meta").tensors()
    assert after.to("meta").sequences.is_meta
    assert moved.keys() == after.tensors().keys()
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}


def test_a_program_without_process_group_is_its_own_rank_0():
    comm, tensor = SingleProcess(), torch.tensor([1.0])
    comm.all_reduce(tensor, "max").add_(1)
    assert tensor.tolist() == [1.0], "the result is a new tensor"
    assert (comm.rank, comm.world_size, comm.all_gather_object("x")) == (0, 1, ["x"])
