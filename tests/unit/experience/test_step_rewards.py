"""Rewards of steps and tokens with estimators that compare responses: by hand and by a naive loop."""

import math
import random
import statistics

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import FinishReason, Prompt, SingleProcess
from tests.samples import one_segment, with_last

WHOLE = ["reinforce_baseline", "rloo", "dr_grpo", "remax"]
RUNNING = {"normalize_reward": "running"}
BY_GROUP = {"normalize_reward": "group"}
REQUIRED = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "n_samples_per_prompt": 4}


def maker(name, reference=None, critic=None, **options):
    """Without an actor: log-probs are those of the samples."""
    config = from_options(TrainPPOConfig, **REQUIRED, advantage_estimator=name, **options)
    where = SingleProcess(), torch.device("cpu")
    return ExperienceMaker(lambda *_: None, critic, reference, config, *where, pad_token_id=0)


def response(steps, score=0.0, group=0, after=0, greedy=None):
    """One prompt token, then steps of so many tokens with such a reward at the last, then tokens ``after`` them."""
    rewards, ends = [0.0], [False]
    for n_tokens, reward in steps:
        rewards += [0.0] * (n_tokens - 1) + [reward]
        ends += [False] * (n_tokens - 1) + [True]
    n = len(rewards) - 1 + after
    return one_segment(
        token_ids=[3] * (n + 1),
        action_mask=[False] + [True] * n,
        log_probs=[0.0] + [-1.0] * n,
        versions=[-1] + [0] * n,
        finish_reason=FinishReason.STOP,
        prompt=Prompt("", [3]),
        group=group,
        token_rewards=rewards + [0.0] * after,
        step_ends=ends + [False] * after,
        scores={"score": score},
        greedy=greedy,
    )


def experience_of(one, samples):
    return one.make(Rollout(samples, Metrics()), Metrics())


def advantages(name, samples, **options):
    """Of the actions of each response."""
    rows = experience_of(maker(name, **options), samples)
    return [row.advantages[0, 1:].tolist() for row in rows]


HALF, TWO = math.sqrt(0.5), math.sqrt(2.25)
BY_HAND = {
    # step rewards 1, 0, 1, 1: mean 0.75, std sqrt(0.75 / 3) = 0.5, so 0.5, -1.5, 0.5, 0.5; a reward of 0 counts
    "process supervision": (
        [response([(2, 1.0), (1, 0.0)], after=1), response([(1, 1.0), (2, 1.0)])],
        [[-1.0, -1.0, -1.5, 0.0], [1.0, 0.5, 0.5]],
    ),
    "steps alike leave the comparison to scores": (
        [response([(1, 0.2), (1, 0.8)], score) for score in (1.0, 0.0)],
        [[0.5 / HALF] * 2, [-0.5 / HALF] * 2],
    ),
    # scores 3, 1: mean 2, variance 2; steps 1, 0, 1, 1: mean 0.75, variance 0.25
    "scores and steps are divided by one number": (
        [response([(1, 1.0), (1, 0.0)], 3.0, after=1), response([(1, 1.0), (1, 1.0)], 1.0)],
        [[(1 - 0.5) / TWO, (1 - 0.75) / TWO, 1 / TWO], [(-1 + 0.5) / TWO, (-1 + 0.25) / TWO]],
    ),
    "a single step in a group": (
        [response([(2, 0.9)]), response([], after=1)],
        [[0.0, 0.0], [0.0]],
    ),
    "each token is a step": (
        [with_last(response([(1, 1.0), (1, last)]), step_ends=None) for last in (0.0, 1.0)],
        [[-1, -1.5], [1, 0.5]],
    ),
}


@pytest.mark.parametrize(("samples", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_group_norm_by_hand(samples, expected):
    assert advantages("group_norm", samples) == [pytest.approx(row, abs=1e-6) for row in expected]


def test_rewards_normalized_by_group_are_penalized_and_clipped_before_gae():
    options = {"missing_eos_penalty": 0.25, "reward_clip_range": (-0.9, 2.0), "lambd": 1.0}
    one = maker(
        "gae", critic=lambda inputs: torch.full(inputs.sequences.shape, 0.5), **BY_GROUP, **options
    )
    samples = [
        response([], score, group, after=2)
        for score, group in ((3.0, 7), (5.0, 8), (1.0, 7), (5.0, 8))
    ]
    cut = [with_last(sample, finish_reason=FinishReason.LENGTH) for sample in samples[2:]]
    samples = [*samples[:2], *cut]
    metrics = Metrics()
    rows = one.make(Rollout(samples, metrics), metrics)
    found = [row.advantages[0, 1:].tolist() for row in rows]
    shaped = [HALF, 0.0, -0.9, -0.25]  # 3 and 1: mean 2, std sqrt 2, and -HALF - 0.25 is clipped
    assert found == [pytest.approx([reward - 0.5] * 2) for reward in shaped]
    reduced = metrics.reduced(SingleProcess())
    assert (reduced["reward"], reduced["shaped_reward"]) == (
        3.5,
        pytest.approx(statistics.fmean(shaped)),
    )


@pytest.mark.parametrize("name", WHOLE)
def test_the_others_give_each_action_the_whole_advantage(name):
    greedy = response([(1, 0.75)], 0.5)
    samples = [
        response([(2, 0.5), (1, 0.25)], 1.0, after=1, greedy=greedy),
        response([(1, 0.5)], greedy=greedy),
        response([(1, 1.0), (1, 0.0)], 2.0, greedy=greedy),
    ]
    baselines = {"rloo": [1.75, 2.375, 1.125], "remax": [1.25] * 3}.get(name, [1.75] * 3)
    for sample, total, baseline, found in zip(
        samples, [1.75, 0.5, 3.0], baselines, advantages(name, samples), strict=True
    ):
        n_actions = len(sample.last.token_ids) - 1
        assert found == pytest.approx([total - baseline] * n_actions, abs=1e-6)


@pytest.mark.parametrize("name", ["group_norm", *WHOLE])
def test_equal_responses_have_no_advantage_anywhere(name):
    steps = [(2, 0.1), (1, 0.7), (3, 1 / 3)]
    greedy = response(steps, 0.3, after=2)
    assert (
        advantages(name, [response(steps, 0.3, after=2, greedy=greedy) for _ in range(4)])
        == [[0.0] * 8] * 4
    )


def naive(samples, gamma):
    """Process supervision, one group, response and token after the other."""
    result = []
    for sample in samples:
        group = [other for other in samples if other.group == sample.group]
        scores = [other.scores["score"] for other in group]
        steps = [reward for other in group for reward in other.last.step_rewards]
        std = math.sqrt(statistics.variance(scores) + statistics.variance(steps))
        to_go = (sample.scores["score"] - statistics.fmean(scores)) / std
        segment = sample.last
        returns = [0.0] * len(segment.token_ids)
        actions = [t for t, is_action in enumerate(segment.action_mask) if is_action]
        for t in reversed(actions):
            to_go *= 1 if t == actions[-1] else gamma
            if segment.step_ends[t]:
                to_go += (segment.token_rewards[t] - statistics.fmean(steps)) / std
            returns[t] = to_go
        result.append(returns[1:])
    return result


def many():
    """Three groups of unequal size in any order; unequal lengths, tokens of an environment, steps that end there."""
    rng = random.Random(1)
    samples = []
    for i in range(15):
        steps = [(rng.randint(1, 3), rng.random()) for _ in range(rng.randint(1, 5))]
        sample = response(steps, rng.random(), group=100 * (i % 3), after=rng.randint(0, 3))
        mask = sample.last.action_mask
        between = [rng.random() < 0.8 for _ in mask[1:-1]]
        action_mask = [*mask[:1], *between, *mask[-1:]]
        finish_reason = rng.choice(list(FinishReason))
        samples.append(with_last(sample, action_mask=action_mask, finish_reason=finish_reason))
    rng.shuffle(samples)
    return samples


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_process_supervision_equals_a_naive_loop(gamma):
    samples = many()
    for found, expected in zip(
        advantages("group_norm", samples, gamma=gamma), naive(samples, gamma), strict=True
    ):
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_kl_penalty_stays_at_its_token():
    samples = [response([(2, 1.0), (1, 0.0)]), response([(1, 1.0), (2, 1.0)])]
    options: dict = {
        "reference": lambda inputs, actions: -1.5 * actions
    }  # the engine's log-probs are -1
    found = advantages("group_norm", samples, init_kl_coef=0.25, **options)[0]
    assert found == pytest.approx(
        [a - 0.25 * 0.5 * n for a, n in zip([-1.0, -1.0, -1.5], (3, 2, 1), strict=True)]
    )


STEPS = [(1, 1.0), (1, 0.0)], [(1, 1.0), (1, 1.0)]


@pytest.mark.parametrize("scores", [(0.0, 0.0), (3.0, 1.0)])
@pytest.mark.parametrize("options", [RUNNING, BY_GROUP], ids=["running", "group"])
def test_normalizers_divide_steps_and_centre_the_whole_reward(scores, options):
    """Centring each step instead would reward responses by their number of steps."""
    samples = [response(steps, score, after=1) for steps, score in zip(STEPS, scores, strict=True)]
    whole = [1.0 + scores[0], 2.0 + scores[1]]
    deviation = statistics.pstdev if options is RUNNING else statistics.stdev
    mean, std = statistics.fmean(whole), deviation(whole)
    for row, steps, score in zip(
        experience_of(maker("reinforce", **options), samples), STEPS, scores, strict=True
    ):
        expected = [reward / std for _, reward in steps] + [(score - mean) / std]
        assert row.rewards[0, 1:].tolist() == pytest.approx(expected, rel=1e-5)


def test_remax_compares_with_a_greedy_response_normalized_alike():
    greedy = response([(1, 0.5)], 2.0)
    samples = [
        response(steps, score, greedy=greedy)
        for steps, score in zip(STEPS, (3.0, 1.0), strict=True)
    ]
    std = math.sqrt(statistics.pvariance([4.0, 3.0]) + 1e-8)
    found = [row[0] * std for row in advantages("remax", samples, **RUNNING)]
    assert found == pytest.approx([4.0 - 2.5, 3.0 - 2.5], abs=1e-6)
