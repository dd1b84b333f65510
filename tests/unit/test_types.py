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
    Sample,
    SamplingParams,
    Segment,
    SingleProcess,
    segments_of,
)
from tests.samples import with_last

EXPERIENCE = Experience(
    ModelInputs.of_ids([[5, 6, 1], [5, 1]], pad_token_id=0),
    action_mask=torch.tensor([[0, 1, 1], [0, 1, 0]]).bool(),
    rollout_log_probs=torch.zeros(2, 3),
    scores=torch.tensor([1.0, 2.0]),
    truncated=torch.tensor([False, True]),
)
COMPLETION = Completion([6, 7], [-1.0, -2.0], [0, 0], FinishReason.STOP)
RESPONSE = Sample.of_response(Prompt("a", [5]), COMPLETION, group=0)


def in_segments(*numbers_of_actions):
    """A sample with a segment for each number, with so many actions."""
    segments = []
    for n in numbers_of_actions:
        completion = Completion([6] * n, [-1.0] * n, [0] * n, FinishReason.STOP)
        segments.append(Segment.of_response(Prompt("a", [5]), completion))
    return Sample(Prompt("a", [5]), group=0, segments=segments)


def test_the_lists_of_a_segment_are_equally_long():
    lists = {
        "token_ids": [5, 6, 7],
        "action_mask": [False, True, True],
        "log_probs": [0.0, -1.0, -2.0],
    }
    lists["versions"] = [-1, 0, 0]
    others = {"finish_reason": FinishReason.STOP, "n_prompt": 1}
    assert Segment(**lists, **others).response_ids == [6, 7]
    for name, values in lists.items():
        with pytest.raises(AssertionError, match="unequal length"):
            Segment(**(lists | {name: values[:-1]}), **others)


def test_a_sample_has_a_segment_and_no_negative_weight():
    with pytest.raises(AssertionError, match="a sample has a segment"):
        Sample(Prompt("a", [5]), group=0, segments=[])
    with pytest.raises(AssertionError, match="negative weight -0.5"):
        dataclasses.replace(RESPONSE, weight=-0.5)


def test_a_response_is_a_sample_of_one_segment():
    [segment] = RESPONSE.segments
    assert segment is RESPONSE.last
    assert (segment.prompt_ids, segment.response_ids) == ([5], [6, 7])
    assert segment.action_mask == [False, True, True]
    assert segment.log_probs == [0.0, -1.0, -2.0]
    assert segment.versions == [-1, 0, 0]
    assert (RESPONSE.n_actions, RESPONSE.fractions) == (2, [1.0])


def test_fractions_are_shares_of_the_actions_and_sum_to_1():
    sample = in_segments(1, 0, 4, 3)
    assert sample.n_actions == 8
    assert sample.fractions == [0.125, 0.0, 0.5, 0.375]
    assert sum(in_segments(1, 5, 7).fractions) == pytest.approx(1.0)
    assert in_segments(0).fractions == [1.0], "a stand-in without actions counts as a whole"


def test_the_segments_of_samples_are_in_order():
    first = in_segments(1, 2)
    second = in_segments(3)
    assert segments_of([first, second]) == [*first.segments, *second.segments]
    assert segments_of([]) == []


def test_the_total_reward_sums_scores_and_all_segments():
    sample = in_segments(1, 2, 1)
    rewards = [[0.0, 0.5], None, [0.0, 0.25]]
    segments = [
        dataclasses.replace(segment, token_rewards=token_rewards)
        for segment, token_rewards in zip(sample.segments, rewards, strict=True)
    ]
    scores = {"right": 1.0, "brief": 4.0}
    sample = dataclasses.replace(sample, segments=segments, scores=scores)
    assert sample.total_reward({}) == 5.75
    assert sample.total_reward({"brief": -0.25, "other": 9.0}) == 0.75
    assert sample.total_score({"brief": -0.25}) == 0.0


def test_other_scores_make_another_sample_with_exactly_these_rewards():
    rewarded = with_last(RESPONSE, token_rewards=[0.0, 0.5, 0.25], step_ends=[False, True, True])
    sample = dataclasses.replace(
        rewarded,
        segments=[rewarded.last, rewarded.last],
        scores={"right": 1.0},
        reward_error="it raised",
        extras={"n": 3.0},
        notes={"answer": "7"},
    )
    before = dataclasses.replace(sample)
    scores = {"brief": 4.0}
    other = sample.with_scores(scores)
    scores["right"] = 8.0
    assert other.scores == {"brief": 4.0}
    assert [segment.token_rewards for segment in other.segments] == [None, None]
    assert [segment.step_ends for segment in other.segments] == [None, None]
    assert other.reward_error is None
    assert other.total_reward({}) == 4.0
    assert sample == before, "the original is as it was"
    assert (sample.scores, sample.reward_error) == ({"right": 1.0}, "it raised")
    assert [sum(segment.token_rewards) for segment in sample.segments] == [0.75, 0.75]

    kept = {field.name for field in dataclasses.fields(Sample)}
    for name in kept - {"scores", "segments", "reward_error"}:
        assert getattr(other, name) == getattr(sample, name), name
    unrewarded = [RESPONSE.last, RESPONSE.last]
    assert other.segments == unrewarded

    by_token = sample.with_scores({}, token_rewards=[0.0, 2.0, 3.0])
    assert [segment.token_rewards for segment in by_token.segments] == [None, [0.0, 2.0, 3.0]]
    assert by_token.total_reward({}) == 5.0
    assert by_token.last.step_rewards == [2.0, 3.0], "each action is a step"


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
        RESPONSE,
        RESPONSE.last,
    ],
)
def test_what_travels_between_parts_cannot_be_changed_on_the_way(noun):
    for field in dataclasses.fields(noun):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, field.name, None)


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


def test_token_rewards_of_a_copy_are_those_of_actions():
    completion = Completion([9, 1], [-0.7, -0.1], [3, 3], finish_reason=FinishReason.STOP)
    sample = Sample.of_response(Prompt("a", [5]), completion, group=0)
    rewarded = sample.with_scores({}, token_rewards=[9.0, 1.0, 1.0])
    assert rewarded.last.token_rewards == [0.0, 1.0, 1.0]
    assert rewarded.total_reward({}) == 2.0
    with pytest.raises(ValueError):
        sample.with_scores({}, token_rewards=[1.0])
    with pytest.raises(AssertionError, match="unequal length"):
        dataclasses.replace(sample.last, token_rewards=[1.0])
