"""Rewards of steps and tokens with estimators that compare responses: by hand, by a naive loop, and by learning."""

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import Experience, FinishReason, Prompt, SingleProcess, Trajectory

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
WHOLE = ["reinforce_baseline", "rloo", "dr_grpo", "remax"]
KL_COEF = 0.25


def maker(name: str, comm: Any = None, **options: Any) -> ExperienceMaker:
    """Without any model: log-probs are those of the trajectories."""
    config = from_options(
        TrainPPOConfig,
        pretrain="m", prompt_data="d", reward_fn="f.py", advantage_estimator=name, n_samples_per_prompt=4, **options,
    )  # fmt: skip
    return ExperienceMaker(
        lambda *_: None, None, None, config, comm or SingleProcess(), torch.device("cpu"), pad_token_id=0
    )


def response(steps: list[tuple[int, float]], score: float = 0.0, group: int = 0, after: int = 0) -> Trajectory:
    """One prompt token, then steps of so many tokens with such a reward at the last, then tokens ``after`` them."""
    rewards, ends = [0.0], [False]
    for n_tokens, reward in steps:
        rewards += [0.0] * (n_tokens - 1) + [reward]
        ends += [False] * (n_tokens - 1) + [True]
    rewards, ends = rewards + [0.0] * after, ends + [False] * after
    n = len(rewards)
    return Trajectory(
        token_ids=[3] * n,
        action_mask=[False] + [True] * (n - 1),
        log_probs=[0.0] + [-1.0] * (n - 1),
        versions=[-1] + [0] * (n - 1),
        finish_reason=FinishReason.STOP,
        prompt=Prompt("", [3]),
        group=group,
        scores={"score": score},
        token_rewards=rewards,
        step_ends=ends,
    )


def made(name: str, rows: list[Trajectory], comm: Any = None, **options: Any) -> list[Experience]:
    return experience_of(maker(name, comm, **options), rows)


def experience_of(one: ExperienceMaker, rows: list[Trajectory]) -> list[Experience]:
    return one.make(Rollout(rows, Metrics()), Metrics())


def advantages(name: str, rows: list[Trajectory], **options: Any) -> list[list[float]]:
    """Of the actions of each response."""
    return [row.advantages[0, 1:].tolist() for row in made(name, rows, **options)]


def greedy_for(rows: list[Trajectory], greedy: Trajectory) -> list[Trajectory]:
    for row in rows:
        row.greedy = greedy
    return rows


def test_group_norm_is_process_supervision_by_hand() -> None:
    # step rewards 1, 0, 1, 1: mean 0.75, std sqrt(0.75 / 3) = 0.5, so 0.5, -1.5, 0.5, 0.5; a reward of 0 counts
    rows = [response([(2, 1.0), (1, 0.0)], after=1), response([(1, 1.0), (2, 1.0)])]
    assert advantages("group_norm", rows) == [
        pytest.approx([-1.0, -1.0, -1.5, 0.0]),
        pytest.approx([1.0, 0.5, 0.5]),
    ]


def test_later_steps_of_good_responses_are_not_punished() -> None:
    rng = random.Random(0)
    judged = [[rng.uniform(0.8, 0.95) for _ in range(4)] for _ in range(4)]
    found = advantages("group_norm", [response([(2, p) for p in steps]) for steps in judged])
    everything = [p for steps in judged for p in steps]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    for steps, row in zip(judged, found, strict=True):
        to_go = [sum((p - mean) / std for p in steps[i:]) for i in range(4)]
        assert row == pytest.approx([a for a in to_go for _ in range(2)], abs=1e-4)
    by_step = [statistics.fmean(row[2 * i] for row in found) for i in range(4)]
    assert by_step[0] == pytest.approx(0, abs=1e-5)
    assert max(map(abs, by_step)) < 3  # subtracting whole rewards at the end: -18, -37, -55


@pytest.mark.parametrize("name", WHOLE)
def test_the_others_give_each_action_the_whole_advantage(name: str) -> None:
    rows = [response([(2, 0.5), (1, 0.25)], 1.0, after=1), response([(1, 0.5)]), response([(1, 1.0), (1, 0.0)], 2.0)]
    greedy_for(rows, response([(1, 0.75)], 0.5))
    totals = [1.75, 0.5, 3.0]  # mean 1.75
    expected = {
        "rloo": [0.0, 0.5 - 2.375, 3.0 - 1.125],
        "remax": [total - 1.25 for total in totals],
    }.get(name, [total - 1.75 for total in totals])
    for row, whole, found in zip(rows, expected, advantages(name, rows), strict=True):
        assert found == pytest.approx([whole] * (len(row.token_ids) - 1), abs=1e-6)


@pytest.mark.parametrize("name", ["group_norm", *WHOLE])
@pytest.mark.parametrize("score", [0.0, 0.3])
def test_equal_responses_have_no_advantage_anywhere(name: str, score: float) -> None:
    rows = [response([(2, 0.1), (1, 0.7), (3, 1 / 3)], score, after=2) for _ in range(4)]
    greedy_for(rows, response([(2, 0.1), (1, 0.7), (3, 1 / 3)], score, after=2))
    assert advantages(name, rows) == [[0.0] * 8] * 4


def test_steps_alike_in_all_responses_leave_the_comparison_to_scores() -> None:
    rows = [response([(1, 0.2), (1, 0.8)], score) for score in (1.0, 0.0)]
    each = 0.5 / math.sqrt(0.5)
    assert advantages("group_norm", rows) == [pytest.approx([each] * 2), pytest.approx([-each] * 2)]


def test_scores_and_steps_are_divided_by_one_number() -> None:
    # scores 3, 1: mean 2, variance 2; steps 1, 0, 1, 1: mean 0.75, variance 0.25
    rows = [response([(1, 1.0), (1, 0.0)], 3.0, after=1), response([(1, 1.0), (1, 1.0)], 1.0)]
    std = math.sqrt(2.25)
    assert advantages("group_norm", rows) == [
        pytest.approx([(1 - 0.5) / std, (1 - 0.75) / std, 1 / std]),
        pytest.approx([(-1 + 0.5) / std, (-1 + 0.25) / std]),
    ]


def test_weights_between_scores_and_steps_matter() -> None:
    rows = [response([(1, 1.0), (1, 0.0)], 3.0), response([(1, 1.0), (1, 1.0)], 1.0)]
    options = [{"reward_weights": (f"score={w}",), "reward_clip_range": (-1e9, 1e9)} for w in (1e-6, 1e6)]
    light, heavy = (advantages("group_norm", rows, **each) for each in options)
    assert light[0] == pytest.approx([-1.0, -1.5], abs=1e-4)  # as without scores
    assert heavy[0] == pytest.approx([1 / math.sqrt(2)] * 2, abs=1e-4)  # as without steps


def test_groups_without_steps_keep_their_numbers_bit_for_bit() -> None:
    plain = [response([], score, group=5, after=3) for score in (0.1, 0.7, 0.9)]
    for row in plain:
        row.token_rewards = row.step_ends = None
    others = [response([(1, reward)], group=2) for reward in (0.5, 0.2)]
    for name in ("group_norm", *WHOLE[:3]):
        alone, beside = made(name, plain), made(name, [*others, *plain])[2:]
        assert all(torch.equal(a.rewards, b.rewards) for a, b in zip(alone, beside, strict=True))


def test_a_single_step_in_a_group_is_no_error() -> None:
    rows = [response([(2, 0.9)]), response([], after=1)]
    assert advantages("group_norm", rows) == [[0.0, 0.0], [0.0]]


def naive(rows: list[Trajectory], gamma: float) -> list[list[float]]:
    """Process supervision, one group, response and token after the other."""
    result = []
    for row in rows:
        group = [t for t in rows if t.group == row.group]
        scores = [t.scores["score"] for t in group]
        steps = [
            r
            for t in group
            for r, end, action in zip(t.token_rewards or [], t.step_ends or [], t.action_mask, strict=True)
            if end and action
        ]
        std = math.sqrt(statistics.variance(scores) + statistics.variance(steps))
        to_go, found = (row.scores["score"] - statistics.fmean(scores)) / std, []
        first = True
        for t in reversed(range(len(row.token_ids))):
            if not row.action_mask[t]:
                found.insert(0, 0.0)
                continue
            to_go, first = to_go if first else gamma * to_go, False
            if row.step_ends[t]:
                to_go += (row.token_rewards[t] - statistics.fmean(steps)) / std
            found.insert(0, to_go)
        result.append(found[1:])
    return result


def many(seed: int) -> list[Trajectory]:
    """Three groups of unequal size in any order; unequal lengths, tokens of an environment, steps that end there."""
    rng = random.Random(seed)
    rows = []
    for i in range(15):
        steps = [(rng.randint(1, 3), rng.random()) for _ in range(rng.randint(1, 5))]
        row = response(steps, rng.random(), group=100 * (i % 3), after=rng.randint(0, 3))
        row.action_mask = [False] + [rng.random() < 0.8 for _ in row.token_ids[1:-1]] + [True]
        row.finish_reason = rng.choice(list(FinishReason))
        rows.append(row)
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_process_supervision_equals_a_naive_loop(gamma: float) -> None:
    rows = many(1)
    for found, expected in zip(advantages("group_norm", rows, gamma=gamma), naive(rows, gamma), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["group_norm", "rloo"])
def test_ranks_with_whole_groups_make_what_one_rank_would(name: str, on_ranks: OnRanks) -> None:
    rows = sorted(many(2), key=lambda row: row.group)
    parts = [rows[:10], rows[10:]]
    split = on_ranks(2, lambda comm: made(name, parts[comm.rank], comm))
    for found, expected in zip(split[0] + split[1], made(name, rows), strict=True):
        torch.testing.assert_close(found.advantages, expected.advantages, rtol=0, atol=1e-6)


def test_the_kl_penalty_stays_at_its_token() -> None:
    rows = [response([(2, 1.0), (1, 0.0)]), response([(1, 1.0), (2, 1.0)])]
    one = maker("group_norm", init_kl_coef=KL_COEF)
    one.reference = lambda ids, mask, actions: -1.5 * actions  # the engine's log-probs are -1
    found = one.make(Rollout(rows, Metrics()), Metrics())
    penalties = [-KL_COEF * 0.5 * n for n in (3, 2, 1)]
    expected = [a + b for a, b in zip([-1.0, -1.0, -1.5], penalties, strict=True)]
    assert found[0].advantages[0, 1:].tolist() == pytest.approx(expected, abs=1e-6)


def test_rewards_of_each_token_count_one_by_one() -> None:
    rows = [response([(1, 1.0), (1, 0.0)]), response([(1, 1.0), (1, 1.0)])]
    for row in rows:
        row.step_ends = None
    assert advantages("group_norm", rows)[0] == pytest.approx([-1.0, -1.5])


RUNNING = {"normalize_reward": True, "reward_normalizer": "running"}


def test_running_normalization_reaches_rewards_of_steps() -> None:
    # steps 1, 0, 1, 1: mean 0.75, biased variance 0.1875; none of the scores differ
    rows = [response([(2, 1.0), (1, 0.0)], after=1), response([(1, 1.0), (2, 1.0)])]
    std = math.sqrt(0.1875 + 1e-8)
    for row, steps in zip(made("reinforce", rows, **RUNNING), [[0, 0.25, -0.75, 0], [0.25, 0, 0.25]], strict=True):
        assert row.rewards[0, 1:].tolist() == pytest.approx([r / std for r in steps])
    greedy_for(rows, response([(1, 0.5)]))  # normalized too
    whole = [(1 + 0 - 1.5) / std, (2 - 1.5) / std]
    baseline = (0.5 - 0.75) / std
    found = [row[0] for row in advantages("remax", rows, **RUNNING)]
    assert found == pytest.approx([each - baseline for each in whole])


def test_running_normalization_keeps_the_weights_of_scores_and_steps() -> None:
    # scores 3, 1: mean 2, biased variance 1; steps as above
    rows = [response([(1, 1.0), (1, 0.0)], 3.0, after=1), response([(1, 1.0), (1, 1.0)], 1.0)]
    std = math.sqrt(1 + 0.1875 + 1e-8)
    expected = [[0.25 / std, -0.75 / std, 1 / std], [0.25 / std, (0.25 - 1) / std]]
    for row, rewards in zip(made("reinforce", rows, **RUNNING), expected, strict=True):
        assert row.rewards[0, 1:].tolist() == pytest.approx(rewards)


def test_running_normalization_of_steps_remembers_all_ranks_and_rollouts(on_ranks: OnRanks) -> None:
    rows = many(3)
    parts = [rows[:6], rows[6:]]

    def work(comm: Any) -> list[Experience]:
        one = maker("reinforce", comm, **RUNNING)
        experience_of(one, parts[comm.rank][:1])
        return experience_of(one, parts[comm.rank])

    alone = maker("reinforce", **RUNNING)
    experience_of(alone, [parts[0][0], parts[1][0]])
    split = on_ranks(2, work)
    for found, expected in zip(split[0] + split[1], experience_of(alone, rows), strict=True):
        torch.testing.assert_close(found.rewards, expected.rewards, rtol=0, atol=1e-5)


def learned(name: str, seed: int) -> float:
    """Probability of the right choices of a table of logits: four steps, of whose three choices the last is good."""
    n_steps, n_choices, size = 4, 3, 8
    logits = torch.zeros(n_steps, n_choices, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=0.15)
    generator = torch.Generator().manual_seed(seed)
    rewards_of_choices, one = (0.8, 0.85, 0.95), maker(name)
    for _ in range(100):
        picked = torch.multinomial(logits.detach().softmax(-1), size, True, generator=generator).T  # (size, n_steps)
        rows = [response([(1, rewards_of_choices[c]) for c in row]) for row in picked.tolist()]
        greedy_for(rows, response([(1, rewards_of_choices[c]) for c in logits.argmax(-1).tolist()]))
        adam.zero_grad()
        weights = torch.cat([row.advantages[:, 1:] for row in experience_of(one, rows)])
        weights = weights / (weights.std() + 1e-3)  # one learning rate for all estimators
        log_probs = logits.log_softmax(-1)[torch.arange(n_steps), picked]
        (-(weights * log_probs).mean()).backward()
        adam.step()
    return logits.detach().softmax(-1)[:, -1].min().item()


@pytest.mark.parametrize("name", ["group_norm", *WHOLE])
def test_a_tabular_policy_learns_each_step(name: str) -> None:
    assert min(learned(name, seed) for seed in range(2)) > 0.95
