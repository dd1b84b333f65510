"""From prompts to samples: groups, seeds that know nothing of ranks, every field, and scores that come later."""

import threading
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import pytest

from openppo.experience.scoring import begin_scoring
from openppo.rollout.rollout import Rollout
from openppo.rollout.scores import scored
from openppo.rollout.seeds import sample_seed
from openppo.tracking import Metrics
from openppo.types import (
    Completion,
    FinishReason,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    StopCheck,
)
from tests.playing import InstantEngine, sample_responses
from tests.samples import with_last

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [
    Prompt(f"text {i}", [3 + i] * (1 + i % 3), label=i, row={"input": f"text {i}"})
    for i in range(6)
]


class RecordingEngine(InstantEngine):
    """Answers each prompt with its first token and remembers what it was asked."""

    def __init__(self, version=0):
        super().__init__()
        self.use_version(version)
        self.prompts: list[Sequence[int]] = []
        self.seeds: list[int] = []

    def answers(self, prompts, params, seeds):
        """One token for each prompt."""
        assert params == PARAMS
        self.prompts += [prompt.token_ids for prompt in prompts]
        self.seeds += seeds
        return [
            Completion([prompt.token_ids[0]], [-0.5], [self.version], FinishReason.LENGTH)
            for prompt in prompts
        ]


def sampled(prompts, n_samples, seed=0, first_group=0, version=0):
    """Samples, and the engine."""
    engine = RecordingEngine(version)
    samples = sample_responses(
        engine, prompts, PARAMS, n_samples=n_samples, seed=seed, first_group=first_group
    )
    return samples, engine


def test_samples_of_a_prompt_are_beside_each_other_and_share_its_group_but_no_list():
    samples, engine = sampled(PROMPTS[:3], 2, first_group=10)
    assert [sample.group for sample in samples] == [10, 10, 11, 11, 12, 12]
    assert [sample.prompt.text for sample in samples] == [
        "text 0",
        "text 0",
        "text 1",
        "text 1",
        "text 2",
        "text 2",
    ]
    assert engine.prompts == [[3], [3], [4, 4], [4, 4], [5, 5, 5], [5, 5, 5]]
    samples[0].last.token_ids.append(99)
    samples[0].scores["reward"] = 1.0
    assert PROMPTS[0].token_ids == [3]
    assert (samples[1].last.token_ids, samples[1].scores) == ([3, 3], {})
    assert sampled([], 3)[0] == []


def test_all_samples_of_a_run_and_of_neighbouring_runs_have_seeds_of_their_own():
    seeds = [seed for group in range(0, 600, 6) for seed in sampled(PROMPTS, 4, 42, group)[1].seeds]
    seeds += [sample_seed(seed, number) for seed in (41, 43) for number in range(2400)]
    assert len(set(seeds)) == len(seeds) == 3 * 2400
    assert all(0 <= seed < 2**63 for seed in seeds), "what torch.Generator.manual_seed takes"


@pytest.mark.parametrize("n_samples", [1, 3])
def test_seeds_do_not_depend_on_how_prompts_are_dealt_out(n_samples):
    whole = sampled(PROMPTS, n_samples, 7, 20)[1].seeds
    for size in (1, 2, 3):
        parts = [
            sampled(PROMPTS[i : i + size], n_samples, 7, 20 + i)[1]
            for i in range(0, len(PROMPTS), size)
        ]
        assert [seed for part in parts for seed in part.seeds] == whole


def test_a_sample_says_of_each_token_where_it_came_from():
    prompt = Prompt("ab", [11, 12], label="x", row={"input": "ab"})
    completion = Completion(
        [13, 14, 1], [-0.1, -0.2, -0.3], [9, 9, 10], finish_reason=FinishReason.STOP
    )
    segment = Segment(
        token_ids=[11, 12, 13, 14, 1],
        action_mask=[False] * 2 + [True] * 3,
        log_probs=[0.0, 0.0, -0.1, -0.2, -0.3],
        versions=[-1, -1, 9, 9, 10],
        n_prompt=2,
        finish_reason=FinishReason.STOP,
        media=(),
        token_rewards=None,
        step_ends=None,
        trained_mask=None,
    )
    sample = Sample.of_response(prompt, completion, group=4)
    assert sample == Sample(
        prompt, group=4, segments=[segment], scores={}, weight=1.0, episode=None, greedy=None
    )
    assert sample.last.response_ids == [13, 14, 1]
    assert sampled(PROMPTS[:1], 1, version=6)[0][0].last.versions == [-1, 6]


def test_scores_add_up_by_name_and_those_of_tokens_by_place():
    [[sample], _] = sampled(PROMPTS[:1], 1)
    sample = scored(sample, Score({"math": 1.0}))
    sample = scored(sample, Score(token_rewards=[0.0, 0.25]))
    assert sample.total_reward({"math": 2.0}) == 2.25
    sample = scored(sample, Score(token_rewards=[1.0, 0.0], step_ends=[False, True]))
    assert (sample.last.token_rewards, sample.last.step_ends) == ([0.0, 0.0], [False, True])
    assert sample.last.step_rewards == [0.0]


class Gate:
    """A scorer in the background whose rewards, of samples and tokens, arrive when ``opened`` is set."""

    collective = False

    def __init__(self, reward):
        self.reward = reward
        self.opened = threading.Event()

    def score(self, samples):
        assert self.opened.wait(10)
        return [
            Score(
                {"late": self.reward},
                [self.reward] * len(sample.last.token_ids),
                extras={"n": self.reward},
                notes={"text": str(self.reward)},
            )
            for sample in samples
        ]


def test_a_sample_taken_from_a_rollout_is_not_overwritten_by_later_scores():
    samples, _ = sampled(PROMPTS[:2], 1)
    gate = Gate(1.0)
    rollout = begin_scoring(gate, samples, StopCheck())
    taken = rollout.unscored[0]
    own = taken.with_scores({"own": 2.0}, token_rewards=[0.0, 0.5])
    gate.opened.set()
    scored_sample = rollout[0]
    assert (scored_sample.scores, scored_sample.last.token_rewards) == ({"late": 1.0}, [0.0, 1.0])
    assert (scored_sample.extras, scored_sample.notes) == ({"n": 1.0}, {"text": "1.0"})
    for each in (taken, samples[0]):
        assert (each.scores, each.extras, each.notes) == ({}, {}, {})
        assert each.last.token_rewards is None
    assert (own.scores, own.last.token_rewards) == ({"own": 2.0}, [0.0, 0.5])

    again = Gate(3.0)
    again.opened.set()
    rescored = begin_scoring(again, rollout, StopCheck())
    assert rescored[0].scores == {"late": 3.0}
    assert scored_sample.scores == {"late": 1.0} and rollout[0] is scored_sample
    assert scored_sample.last.token_rewards == [0.0, 1.0]
    with pytest.raises(FrozenInstanceError):
        scored_sample.scores = {}
    with pytest.raises(FrozenInstanceError):
        scored_sample.last.token_rewards = None


def test_reading_a_rollout_takes_the_scores_once():
    samples, _ = sampled(PROMPTS[:3], 1)
    calls = []

    def take_scored():
        calls.append(len(calls))
        return [sample.with_scores({"a": 1.0}) for sample in samples]

    rollout = Rollout(samples, Metrics(), take_scored)
    assert len(rollout) == 3 and rollout.unscored == samples and calls == []
    assert [sample.scores for sample in rollout] == [{"a": 1.0}] * 3
    assert [sample.prompt for sample in rollout[1:]] == [sample.prompt for sample in samples[1:]]
    assert rollout[-1] is rollout.unscored[2] and calls == [0]


def test_a_mapped_rollout_waits_for_scores_and_keeps_the_first_as_it_is():
    samples, _ = sampled(PROMPTS[:2], 1)
    gate = Gate(1.0)
    rollout = begin_scoring(gate, samples, StopCheck())
    doubled = rollout.map(lambda sample: sample.with_scores({"a": 2 * sample.scores["late"]}))
    assert [sample.scores for sample in doubled.unscored] == [{}, {}]
    gate.opened.set()
    assert [sample.scores for sample in doubled] == [{"a": 2.0}] * 2
    assert [sample.scores for sample in rollout] == [{"late": 1.0}] * 2
    assert doubled.metrics is rollout.metrics


def test_new_rewards_replace_all_others_in_all_segments():
    [[sample], _] = sampled(PROMPTS[:1], 1)
    rewarded = with_last(sample, token_rewards=[0.0, 1.0], step_ends=[False, True])
    segments = [rewarded.last, rewarded.last]
    both = replace(rewarded, segments=segments, scores={"a": 1.0}, reward_error="lost")
    assert both.total_reward({"a": 0.5}) == 2.5, "of all segments"
    fresh = both.with_scores({"b": 4.0}, token_rewards=[0.0, 0.25])
    assert [segment.token_rewards for segment in fresh.segments] == [None, [0.0, 0.25]]
    assert [segment.step_ends for segment in fresh.segments] == [None, None]
    assert (fresh.scores, fresh.reward_error) == ({"b": 4.0}, None)
    assert both.total_reward({}) == 3.0, "the other stays as it was"
