"""Evaluation against hand-computed numbers and naive counts, for any number of ranks."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest

from openppo.trainer.evaluation import Evaluation, Evaluator, pass_at_k
from openppo.trainer.evaluation.evaluator import pass_ks, short_names
from openppo.types import Completion, FinishReason, Prompt, SamplingParams, Score, SingleProcess, Trajectory
from tests.ranks import on_ranks

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7)
WEIGHTS = {"bonus": 0.25}


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 1, 1, 1),
        (1, 0, 1, 0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (5, 2, 2, 1 - 3 / 10),  # 3 of the 10 pairs hold no passing one
        (6, 2, 3, 1 - 4 / 20),
        (6, 4, 3, 1),  # any three hold a passing one
        (10, 1, 10, 1),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_passing_response() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            passes = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(passes, k))
                share = Fraction(sum(any(subset) for subset in subsets), len(subsets))
                assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_of_very_many_responses_is_exact() -> None:
    all_fail = math.prod((1990 - drawn) / (2000 - drawn) for drawn in range(50))  # one draw after the other
    assert pass_at_k(2000, 10, 50) == pytest.approx(1 - all_fail, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_pass_at_k_of_impossible_counts_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} cannot be estimated from {n} responses of which {c} pass"):
        pass_at_k(n, c, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_all() -> None:
    assert [pass_ks(n) for n in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], []),
        (["/data/a.jsonl"], ["a.jsonl"]),
        (["/data/a.jsonl", "openai/gsm8k"], ["a.jsonl", "gsm8k"]),
        (["/data/gsm8k/test.jsonl", "math/test.jsonl"], ["gsm8k/test.jsonl", "math/test.jsonl"]),
        (["test.jsonl", "/test.jsonl"], ["test.jsonl", "/test.jsonl"]),
        (["a", "./a"], ["a", "./a"]),  # the same file twice
    ],
)
def test_sources_are_called_by_the_end_of_their_path(sources: list[str], expected: list[str]) -> None:
    assert list(short_names(sources).values()) == expected


class FakeEngine:
    """Random tokens that depend on the seed and the prompt only."""

    version = 3

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        assert params == PARAMS
        return [self._answer(ids, random.Random(seed)) for ids, seed in zip(prompts, seeds, strict=True)]

    def _answer(self, prompt: Sequence[int], rng: random.Random) -> Completion:
        tokens = [rng.randrange(10) + prompt[0] for _ in range(rng.randint(1, 4))]
        return Completion(tokens, [-1.0] * len(tokens), rng.choice(list(FinishReason)))


class FakeScorer:
    """Two named rewards, and one for each response token."""

    collective = False

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [
            Score(
                {"right": float(sum(t.response_ids) % 2), "bonus": float(len(t.response_ids))},
                [0.1 * token for token in t.token_ids],
            )
            for t in trajectories
        ]


def prompts_of(*sources: str) -> list[Prompt]:
    return [Prompt(f"prompt {i}", [i + 1] * (1 + i % 3), source=source) for i, source in enumerate(sources)]


def evaluator(prompts: list[Prompt], comm: Any, n_samples: int = 4, pass_reward: float | None = 2.5) -> Evaluator:
    return Evaluator(FakeEngine(), FakeScorer(), comm, prompts, PARAMS, n_samples, pass_reward, {**WEIGHTS}, seed=5)  # type: ignore[arg-type]


def naive_metrics(trajectories: Sequence[Trajectory], pass_reward: float) -> dict[str, float]:
    """By the names of the metrics, without their prefix; four responses to each prompt."""
    right = [float(sum(t.response_ids) % 2) for t in trajectories]
    rewards = [
        r + 0.25 * len(t.response_ids) + sum(0.1 * token for token in t.response_ids)
        for r, t in zip(right, trajectories, strict=True)
    ]
    passed: dict[str, list[bool]] = defaultdict(list)
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        passed[trajectory.prompt.text].append(reward >= pass_reward)

    def pass_at(k: int) -> float:
        shares = [statistics.mean(any(subset) for subset in combinations(four, k)) for four in passed.values()]
        return statistics.mean(shares)

    return {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward/right": statistics.mean(right),
        "reward/bonus": statistics.mean(len(t.response_ids) for t in trajectories),
        "reward/of_tokens": statistics.mean(sum(0.1 * token for token in t.response_ids) for t in trajectories),
        "response_length": statistics.mean(len(t.response_ids) for t in trajectories),
        "truncated_fraction": statistics.mean(t.finish_reason is FinishReason.LENGTH for t in trajectories),
        **{f"pass@{k}": pass_at(k) for k in (1, 2, 4)},
    }


def test_metrics_are_those_of_naive_counts_in_all_and_for_each_source() -> None:
    prompts = prompts_of("math", "code", "math", "math", "code")
    evaluation = evaluator(prompts, SingleProcess()).evaluate()
    assert [t.prompt for t in evaluation.trajectories] == [prompt for prompt in prompts for _ in range(4)]
    expected = {f"eval_{name}": value for name, value in naive_metrics(evaluation.trajectories, 2.5).items()}
    for source in ("math", "code"):
        of_source = [t for t in evaluation.trajectories if t.prompt.source == source]
        expected |= {f"eval/{source}/{name}": value for name, value in naive_metrics(of_source, 2.5).items()}
    assert evaluation.metrics == pytest.approx(expected, abs=1e-9)
    assert 0.1 < evaluation.metrics["eval_pass@1"] < evaluation.metrics["eval_pass@4"] <= 1, "some pass, some do not"


def test_a_single_reward_is_reported_once_and_errors_are_counted() -> None:
    asked: Any = evaluator(prompts_of("", "", ""), SingleProcess())
    asked.reward_weights.clear()
    asked.scorer.score = lambda trajectories: [Score({"reward": 0.5}, failed=i < 5) for i in range(len(trajectories))]
    metrics = asked.evaluate().metrics
    assert [name for name in metrics if "reward" in name] == ["eval_reward", "eval_reward_std", "eval_reward_errors"]
    assert all(name.startswith("eval_") for name in metrics), "nor is a single source"
    assert metrics["eval_reward_errors"] == 5


def test_a_weight_for_a_reward_that_does_not_occur_is_an_error() -> None:
    asked: Any = evaluator(prompts_of(""), SingleProcess())
    asked.scorer.score = lambda trajectories: [Score({"right": 1.0, "bonus": 0.5})] * len(trajectories)
    asked.reward_weights["bonsu"] = 2.0
    with pytest.raises(ValueError, match="--reward_weights names bonsu, but the rewards are bonus, right"):
        asked.evaluate()


def test_without_a_reward_that_passes_no_pass_rate_is_reported() -> None:
    measured = evaluator(prompts_of("math", "code"), SingleProcess()).evaluate().metrics
    without = evaluator(prompts_of("math", "code"), SingleProcess(), pass_reward=None).evaluate().metrics
    assert without == {name: value for name, value in measured.items() if "pass@" not in name}
    assert len(without) < len(measured)


def test_a_response_passes_at_the_reward_asked_for_up_to_rounding() -> None:
    rounded = 1.0 * 0.7 + 1.0 * 0.2 + 1.0 * 0.1
    assert rounded < 1.0
    for reward, pass_reward, expected in ((2.5, 2.5, True), (2.5, 2.5 + 1e-6, False), (rounded, 1.0, True)):
        assert evaluator([], SingleProcess(), pass_reward=pass_reward).grading.passes(reward) == expected


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_metrics_and_responses_do_not_depend_on_the_number_of_ranks(world_size: int) -> None:
    prompts = prompts_of("math", "code", "math", "math", "code")
    alone = evaluator(prompts, SingleProcess()).evaluate()
    together: list[Evaluation] = on_ranks(world_size, lambda comm: evaluator(prompts, comm).evaluate())
    assert [trajectory for each in together for trajectory in each.trajectories] == alone.trajectories
    assert together[0].metrics == pytest.approx(alone.metrics, abs=1e-12)
    assert all(each.metrics == together[0].metrics for each in together), "the same numbers to the last bit"


def test_every_evaluation_uses_the_same_random_numbers() -> None:
    asked = evaluator(prompts_of("", ""), SingleProcess())
    first, second = asked.evaluate(), asked.evaluate()
    assert first.trajectories == second.trajectories
    assert len({tuple(t.response_ids) for t in first.trajectories}) > 4, "but each sample its own"
