"""Evaluation against hand-computed numbers and naive counts, for any number of ranks."""

import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from openppo.experience.scoring import begin_scoring
from openppo.tracking.report.run_data import short_names
from openppo.trainer.evaluation.evaluator import Grading, pass_at_k, pass_ks
from openppo.trainer.evaluation.passing import PassWatch
from openppo.types import (
    Completion,
    Ending,
    Episode,
    FinishReason,
    Prompt,
    Sample,
    SamplingParams,
    Score,
    Segment,
    SingleProcess,
    StopCheck,
)
from tests.playing import sample_responses
from tests.ranks import on_ranks
from tests.unit.trainer.conftest import Engine, Scorer

SOURCES = ["math", "code", "math", "math", "code"]
PROMPTS = [
    Prompt(f"prompt {i}", [i + 1] * (1 + i % 3), source=source) for i, source in enumerate(SOURCES)
]
WEIGHTS = {"bonus": 0.25}


def test_pass_at_k_is_the_share_of_subsets_with_a_passing_response():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                share = Fraction(sum(map(any, subsets)), len(subsets))
                assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)
    all_fail = math.prod(
        (1990 - drawn) / (2000 - drawn) for drawn in range(50)
    )  # one draw after the other
    assert pass_at_k(2000, 10, 50) == pytest.approx(1 - all_fail, rel=1e-12)
    assert [pass_ks(n) for n in (1, 2, 3, 4, 6)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
    ]


def test_sources_are_called_by_the_end_of_their_path():
    names = {
        (): (),
        ("/data/a.jsonl", "openai/gsm8k"): ("a.jsonl", "gsm8k"),
        ("/data/gsm8k/test.jsonl", "math/test.jsonl"): ("gsm8k/test.jsonl", "math/test.jsonl"),
        ("test.jsonl", "/test.jsonl"): ("test.jsonl", "/test.jsonl"),
        ("a", "./a"): ("a", "./a"),  # the same file twice
    }
    assert {sources: tuple(short_names(sources).values()) for sources in names} == names


def at_random(_, prompt, seed, params):
    """Tokens that depend on the seed and the prompt only."""
    rng = random.Random(seed)
    tokens = [rng.randrange(10) + prompt[0] for _ in range(rng.randint(1, params.max_new_tokens))]
    return Completion(
        tokens, [-1.0] * len(tokens), [0] * len(tokens), rng.choice(list(FinishReason))
    )


def two_rewards(sample):
    """Two named ones, one for each response token, an extra, and a text."""
    ids = sample.last.response_ids
    return Score(
        {"right": float(sum(ids) % 2), "bonus": float(len(ids))},
        [0.1 * token for token in sample.last.token_ids],
        extras={"first": float(ids[0])},
        notes={"pred": "72"},
    )


def evaluated(comm, prompts=PROMPTS, pass_reward=2.5, weights=WEIGHTS, score_of=two_rewards):
    """Metrics and this rank's scored responses, four to each prompt."""
    params = SamplingParams(max_new_tokens=4, temperature=0.7)
    responses = sample_responses(Engine(at_random), prompts, params, n_samples=4, seed=5, comm=comm)
    scored = begin_scoring(Scorer(score_of), responses, StopCheck(), prefix="eval_")
    return Grading(comm, pass_reward, weights).measure(scored), list(scored)


def naive_metrics(samples, pass_reward):
    """By the names of the metrics, without their prefix; four responses to each prompt."""
    responses = [sample.last.response_ids for sample in samples]
    right = [float(sum(response) % 2) for response in responses]
    lengths = [len(response) for response in responses]
    of_tokens = [sum(0.1 * token for token in response) for response in responses]
    rewards = [
        r + 0.25 * n + tokens for r, n, tokens in zip(right, lengths, of_tokens, strict=True)
    ]
    passed = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        passed[sample.prompt.text].append(reward >= pass_reward)

    def shares_at(k):
        return [
            statistics.mean(any(subset) for subset in combinations(four, k))
            for four in passed.values()
        ]

    def half_width(by_prompt):
        error = statistics.stdev(by_prompt) / len(by_prompt) ** 0.5
        return statistics.NormalDist().inv_cdf(0.975) * error

    means = [statistics.mean(rewards[i : i + 4]) for i in range(0, len(rewards), 4)]

    return {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward/right": statistics.mean(right),
        "reward/bonus": statistics.mean(lengths),
        "reward/of_tokens": statistics.mean(of_tokens),
        "extra/first": statistics.mean(response[0] for response in responses),
        "response_length": statistics.mean(lengths),
        "truncated_fraction": statistics.mean(
            sample.last.finish_reason is FinishReason.LENGTH for sample in samples
        ),
        "reward_ci95": half_width(means),
        **{f"pass@{k}": statistics.mean(shares_at(k)) for k in (1, 2, 4)},
        **{f"pass@{k}_ci95": half_width(shares_at(k)) for k in (1, 2, 4)},
    }


def test_metrics_are_those_of_naive_counts_in_all_and_for_each_source():
    metrics, responses = evaluated(SingleProcess())
    assert [sample.prompt for sample in responses] == [
        prompt for prompt in PROMPTS for _ in range(4)
    ]
    expected = {f"eval_{name}": value for name, value in naive_metrics(responses, 2.5).items()}
    for source in ("math", "code"):
        of_source = [sample for sample in responses if sample.prompt.source == source]
        expected |= {
            f"eval/{source}/{name}": value for name, value in naive_metrics(of_source, 2.5).items()
        }
    assert metrics == pytest.approx(expected, abs=1e-9)
    assert 0.1 < metrics["eval_pass@1"] < metrics["eval_pass@4"] <= 1, "some pass, some do not"
    without, _ = evaluated(SingleProcess(), pass_reward=None)
    assert without == {name: value for name, value in metrics.items() if "pass@" not in name}
    rounded = 1.0 * 0.7 + 1.0 * 0.2 + 1.0 * 0.1
    assert rounded < 1.0
    for reward, pass_reward, expected in (
        (2.5, 2.5, True),
        (2.5, 2.5 + 1e-6, False),
        (rounded, 1.0, True),
    ):
        sample = played(Ending.COMPLETED, 1, {"reward": reward})
        assert Grading(SingleProcess(), pass_reward).passes(sample) == expected


def test_a_single_reward_is_reported_once_and_errors_count():
    def nameless(sample):
        return Score({"reward": 0.5}, failed=sample.prompt.text == "a")

    metrics, _ = evaluated(
        SingleProcess(), [Prompt("a", [1]), Prompt("b", [2])], weights={}, score_of=nameless
    )
    assert [name.removeprefix("eval_reward") for name in metrics if "reward" in name] == [
        *("", "_std", "_max", "_min", "_ci95", "_errors")
    ]
    assert all(name.startswith("eval_") for name in metrics), "nor is a single source"
    assert metrics["eval_reward_errors"] == 4


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_metrics_and_responses_do_not_depend_on_the_number_of_ranks(world_size):
    alone, responses = evaluated(SingleProcess())
    together = on_ranks(world_size, evaluated)
    assert [sample for _, of_rank in together for sample in of_rank] == responses
    assert together[0][0] == pytest.approx(alone, abs=1e-12)
    assert all(metrics == together[0][0] for metrics, _ in together), (
        "the same numbers to the last bit"
    )
    assert len({tuple(sample.last.response_ids) for sample in responses}) > 10, (
        "each sample has random numbers of its own"
    )


def played(ending, n, scores=(), of_turn=None, group=0):
    """An episode in ``n`` segments, of one action each, the last of which has the reward ``of_turn``."""
    segments = []
    for place in range(n):
        segment = Segment(
            token_ids=[1, 2 + place],
            action_mask=[False, True],
            log_probs=[0.0, -1.0],
            versions=[-1, 0],
            n_prompt=1,
            finish_reason=FinishReason.STOP,
        )
        if of_turn is not None:
            reward = of_turn if place == n - 1 else 0.0
            segment = replace(segment, token_rewards=[0.0, reward], step_ends=[False, True])
        segments.append(segment)

    messages = [{"role": "assistant", "content": ending.value}]
    return Sample(
        Prompt("p", [1]),
        group,
        segments,
        scores=dict(scores),
        episode=Episode(messages, ending, n_turns=n),
    )


def test_an_episode_is_scored_once_unless_it_failed_or_has_a_reward():
    seen = []

    def score_of(sample):
        seen.append(sample.last.token_ids)
        return Score({"good": 2.0, "bad": -0.5}, [9.0, 0.25])

    plain = played(Ending.MAX_TURNS, 3)
    turns = played(Ending.COMPLETED, 2, of_turn=0.5, group=1)
    own = played(Ending.COMPLETED, 2, {"reward": 7.0})
    lost = played(Ending.TIMEOUT, 1, {"reward": 0.0})
    samples = [plain, own, turns, lost]
    scored = list(begin_scoring(Scorer(score_of), samples, StopCheck()))
    assert [sample.scores for sample in scored] == [
        {"good": 2.0, "bad": -0.5},
        {"reward": 7.0},
        {"good": 2.0, "bad": -0.5},
        {"reward": 0.0},
    ]
    assert seen == [plain.last.token_ids, turns.last.token_ids], "by the last segment"
    token_rewards = [[segment.token_rewards for segment in sample.segments] for sample in scored]
    assert token_rewards == [
        [None, None, [0.0, 0.25]],
        [None, None],
        [[0.0, 0.0], [0.0, 0.75]],  # rewards of turns and of sources add up
        [None],
    ]
    assert [sample.total_reward({}) for sample in scored] == [1.75, 7.0, 2.25, 0.0]
    assert [sample.scores for sample in samples] == [{}, {"reward": 7.0}, {}, {"reward": 0.0}]
    assert turns.segments[1].token_rewards == [0.0, 0.5], "and the samples stay as they were"


def test_the_reward_of_pass_on_decides_alone():
    right, wrong = {"right": 1.0, "short": -0.2}, {"right": 0.0, "short": 5.0}
    grading = Grading(SingleProcess(), 1.0, {"right": 0.1}, pass_on="right")
    samples = [
        played(Ending.COMPLETED, 2, right, of_turn=-3.0),
        played(Ending.COMPLETED, 1, wrong),
        played(Ending.TIMEOUT, 1, {"reward": 7.0}),
    ]
    assert [grading.passes(sample) for sample in samples] == [True, False, False]
    assert grading.measure(samples)["eval_pass@1"] == pytest.approx(1 / 3)


def test_a_task_without_the_reward_of_pass_on_passes_by_its_sum():
    grading = Grading(SingleProcess(), 1.0, pass_on="right")
    for task, expected in (("sums", True), ("", False)):
        sample = played(Ending.COMPLETED, 1, {"reward": 1.0})
        sample = replace(sample, prompt=Prompt("p", [1], task=task))
        assert grading.passes(sample) == expected


LOW, LOWER = {"right": 0.5, "short": -0.25}, {"right": 0.0, "short": -0.5}
LARGEST = "no held-out response has passed: the largest {}, and --pass_reward is 1. Lower it, or name the reward that "


def looked_at(*evaluations, last=False, **grading):
    """What is logged of evaluations of episodes with such rewards."""
    watch = PassWatch(SingleProcess())
    for i, scores in enumerate(evaluations):
        samples = [played(Ending.COMPLETED, 1, each) for each in scores]
        samples.append(played(Ending.TIMEOUT, 1, {"reward": 0.0}))
        is_last = last and i == len(evaluations) - 1
        watch.look(Grading(SingleProcess(), **grading), samples, is_last=is_last)


def test_a_run_that_nothing_passes_is_warned_once(caplog):
    looked_at(*[[LOW, LOWER]] * 2)
    assert caplog.messages == []
    looked_at(*[[LOW, LOWER]] * 9)
    looked_at([LOW, LOWER], last=True)
    warned = LARGEST.format("reward is 0.25") + "decides: --pass_on right or short."
    assert caplog.messages == [warned] * 2
    caplog.clear()
    looked_at([LOW, LOWER], last=True, pass_on="right")
    assert caplog.messages == [
        LARGEST.format("right is 0.5") + "decides: --pass_on right or short."
    ]


def test_an_unknown_name_of_pass_on_is_a_warning_with_the_known(caplog):
    looked_at([LOW, LOWER], last=True, pass_on="rihgt")
    assert caplog.messages == [
        "--pass_on names rihgt, but the rewards are right, short. Use their names."
    ]


def test_runs_that_pass_or_cannot_yet_are_not_warned(caplog):
    looked_at(
        [{"right": 0.0}, {"reward": 0.0}], last=True, pass_on="right"
    )  # a limit ended the second
    looked_at([LOW, LOWER], [{"right": 1.0}], *[[LOW, LOWER]] * 9, last=True)
    looked_at(*[[{"right": 0.0}, {"right": 0.0}]] * 9, last=True)  # nothing is right so far
    looked_at(*[[LOW, LOWER]] * 9, last=True, pass_reward=None)
    looked_at([], last=True)
    assert caplog.messages == []


def test_rewards_of_all_ranks_are_compared(caplog):
    def look(comm):
        sample = played(Ending.COMPLETED, 1, [LOW, LOWER, {"right": 1.0}][comm.rank])
        PassWatch(comm).look(Grading(comm), [sample], is_last=True)

    on_ranks(2, look)
    assert len(caplog.messages) == 1, "of rank 0"
    caplog.clear()
    on_ranks(3, look)
    assert caplog.messages == []


def test_metrics_count_a_sample_once_however_many_segments_it_has():
    samples = [
        played(Ending.COMPLETED, 3, {"won": 1.0}, of_turn=0.5),
        played(Ending.COMPLETED, 1, {"won": 0.0}),
    ]
    metrics = Grading(SingleProcess(), pass_reward=1.5).measure(samples)
    expected = {
        "reward": 0.75,
        "reward_std": 0.75,
        "reward/won": 0.5,
        "reward/of_tokens": 0.5,
        "pass@1": 0.5,
    }
    assert {name: metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert (metrics["eval_reward_max"], metrics["eval_reward_min"], metrics["eval_pass@2"]) == (
        1.5,
        0.0,
        1.0,
    )
