"""An episode of several turns from scoring to the loss, by hand: nothing but the action mask says what is an action."""

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.measure import measure_mismatch, measure_staleness
from openppo.experience.replay_buffer import collate, join_rows
from openppo.models.loss import PolicyLoss, token_weights
from openppo.rollout.scores import scored
from openppo.tracking import Metrics
from openppo.types import Ending, Episode, FinishReason, Prompt, Score, SingleProcess
from tests.samples import one_segment, with_last


def episode(weight=1.0):
    """Prompt 3 4, action 5 6, three tokens of the environment, action 10 1."""
    actions = [False, False, True, True, False, False, False, True, True]
    return one_segment(
        token_ids=[3, 4, 5, 6, 7, 8, 9, 10, 1],
        action_mask=actions,
        log_probs=[0.0, 0.0, -1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0],
        versions=[-1, -1, 4, 4, -1, -1, -1, 5, 6],
        finish_reason=FinishReason.STOP,
        prompt=Prompt("ab", [3, 4]),
        group=0,
        weight=weight,
    )


def single():
    """Prompt 3, action 5 1."""
    return one_segment(
        token_ids=[3, 5, 1],
        action_mask=[False, True, True],
        log_probs=[0.0, -1.0, -1.5],
        versions=[-1, 6, 6],
        finish_reason=FinishReason.STOP,
        prompt=Prompt("a", [3]),
        group=1,
    )


def test_spans_and_rewards_are_those_of_action_tokens():
    sample = episode()
    assert (sample.last.spans, sample.last.action_ids) == ([(2, 4), (7, 9)], [5, 6, 10, 1])
    score = Score({"game": 2.0}, token_rewards=[9.0, 0, 0, 0.5, 9.0, 0, 0, 0.25, 0])
    sample = scored(sample, score)
    assert sample.last.token_rewards == [0, 0, 0, 0.5, 0, 0, 0, 0.25, 0]
    assert (sample.total_reward({}), sample.last.step_rewards) == (2.75, [0, 0.5, 0.25, 0])
    with pytest.raises(ValueError, match="zip"):
        scored(sample, Score(token_rewards=[1.0] * 4))


def weighted_loss(batch, loss_agg, n_tokens, n_sequences):
    """Loss, and its gradient by log-probs."""
    old = batch.rollout_log_probs
    log_probs = (old + 0.1).requires_grad_()
    per_token = PolicyLoss(reduction="none")(
        log_probs, old, torch.ones_like(old), batch.action_mask
    )
    weights = token_weights(batch.action_mask, loss_agg, n_tokens, n_sequences, 5, batch.weight)
    loss = (per_token * weights).sum()
    return loss.item(), *torch.autograd.grad(loss, log_probs)


@pytest.mark.parametrize(
    ("loss_agg", "expected", "share", "of_half"),
    [  # 4 tokens of weight 0.5, 2 of weight 1
        ("token_mean", (0.5 * 4 + 2) / (0.5 * 4 + 2), 1 / 4, 1 / 8),
        ("sequence_mean", (0.5 + 1) / (0.5 + 1), 1 / 1.5 / 2, 1 / 1.5 / 8),
        ("constant", (0.5 * 4 + 2) / ((0.5 + 1) * 5), 1 / 7.5, 1 / 15),
    ],
)
def test_weights_enter_the_loss_as_by_hand_however_it_is_split(loss_agg, expected, share, of_half):
    batch, r = collate([episode(weight=0.5), single()], pad_token_id=0), math.exp(0.1)
    loss, gradient = weighted_loss(batch, loss_agg, n_tokens=4.0, n_sequences=1.5)
    assert loss == pytest.approx(
        -r * expected, rel=1e-6
    )  # loss of each token: -r, as advantages are 1
    assert (gradient[1, 1].item(), gradient[0, 2].item()) == pytest.approx(
        (-r * share, -r * of_half), rel=1e-6
    )
    samples = [episode(weight=0.25), single(), episode(weight=0.75), episode(), episode(weight=0.0)]
    buffer = ReplayBuffer()
    buffer.append(collate(samples, pad_token_id=0))
    for micro in (1, 2, 5):
        [step] = buffer.mini_batches(5, micro, epochs=1, seed=0)
        counts = step.n_tokens, step.n_sequences
        assert counts == (0.25 * 4 + 2 + 0.75 * 4 + 4, 3.0)
        parts = [weighted_loss(part, loss_agg, *counts)[0] for part in step.micro_batches]
        assert sum(parts) == pytest.approx(
            weighted_loss(collate(samples, 0), loss_agg, *counts)[0], rel=1e-6
        )


def test_staleness_is_in_versions_of_action_tokens():
    metrics = Metrics()
    measure_staleness([episode(), single()], 6, metrics)
    assert metrics.reduced(SingleProcess()) == {
        "staleness": pytest.approx(5 / 6),
        "staleness_max": 2.0,
    }


def test_the_distance_of_the_engine_is_measured_for_each_staleness():
    metrics, mask = Metrics(), torch.tensor([[False, True, True, True]])
    behind, actor = torch.tensor([[9.0, 0.0, 2.0, 2.0]]), torch.tensor([[5.0, -1.0, -2.0, -3.0]])
    gaps = torch.tensor([[0.0, 0.1, 0.2, -0.3]])
    measure_mismatch(actor, actor + gaps, mask, metrics, behind)
    k3 = {gap: math.exp(-gap) - 1 + gap for gap in (0.1, 0.2, -0.3)}
    expected = {"rollout_kl": sum(k3.values()) / 3}
    expected |= {"rollout_kl/lag_0": k3[0.1], "rollout_kl/lag_2": (k3[0.2] + k3[-0.3]) / 2}
    found = {
        name: value
        for name, value in metrics.reduced(SingleProcess()).items()
        if name.startswith("rollout_kl")
    }
    assert found.pop("rollout_kl_k1") == pytest.approx(0.0, abs=1e-6)
    assert found == pytest.approx(expected, abs=1e-6)


def by_token_id(inputs, *_, scale):
    """In place of a model: a number for each token, by its id alone."""
    return torch.sin(scale * inputs.sequences.float())


def experience_of(name, samples, coef=0.1, **options):
    """Experience of ``samples`` by an estimator, a row for each segment, and its metrics."""
    required = {
        "pretrain": "m",
        "prompt_data": "d",
        "reward_fn": "f",
        "advantage_estimator": name,
        "init_kl_coef": coef,
    }
    config = from_options(
        TrainPPOConfig, **required, n_samples_per_prompt=2, old_log_probs="rollout", **options
    )
    reference, critic = (
        (lambda *x: by_token_id(*x, scale=0.3)),
        (lambda *x: by_token_id(*x, scale=0.7)),
    )
    models: Any = (
        None,
        critic if ESTIMATORS[name].uses_critic else None,
        reference if coef else None,
    )
    maker, metrics = (
        ExperienceMaker(*models, config, SingleProcess(), torch.device("cpu"), 0),
        Metrics(),
    )
    buffer = ReplayBuffer(normalizes=ESTIMATORS[name].normalizes("default"))
    buffer.fill(maker.make(samples, metrics))
    return join_rows(buffer.items), metrics.reduced(SingleProcess())


def episodes_at_random(rng, n=6, n_turns=3):
    """Samples of three prompts, with a score and a reward at the end of each turn."""
    samples = []
    for group in range(n // 2):
        greedy = sample_at_random(rng, group, n_turns)
        for _ in range(2):
            samples.append(replace(sample_at_random(rng, group, n_turns), greedy=greedy))
    return samples


def sample_at_random(rng, group, n_turns):
    """A sample of one segment, each turn of which is followed by tokens of an environment."""
    ids = [3, 4]
    mask = [False] * 2
    rewards = [0.0] * 2
    for _ in range(n_turns):
        n_sampled = rng.randint(1, 4)
        n_read = rng.randint(1, 3)
        ids += [rng.randint(5, 99) for _ in range(n_sampled + n_read)]
        mask += [True] * n_sampled + [False] * n_read
        rewards += [0.0] * (n_sampled - 1) + [rng.uniform(-1, 1)] + [0.0] * n_read
    return one_segment(
        token_ids=ids,
        action_mask=mask,
        log_probs=[rng.uniform(-2, -1) * is_action for is_action in mask],
        versions=[0 if is_action else -1 for is_action in mask],
        finish_reason=FinishReason.STOP,
        prompt=Prompt("", [3, 4]),
        group=group,
        token_rewards=rewards,
        step_ends=[reward != 0 for reward in rewards],
        scores={"won": rng.uniform(-1, 1)},
    )


def with_masked(sample, n, rng):
    """``sample`` with ``n`` tokens of an environment somewhere."""
    segment = sample.last
    place = rng.randint(0, len(segment.token_ids))
    fills = {
        "token_ids": 77,
        "action_mask": False,
        "log_probs": 0.0,
        "versions": -1,
        "token_rewards": 0.0,
        "step_ends": False,
    }
    lists = {}
    for name, fill in fills.items():
        entries = getattr(segment, name)
        lists[name] = entries[:place] + [fill] * n + entries[place:]
    return with_last(sample, **lists)


@pytest.mark.parametrize("n_masked", [1, 7, 500])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_of_environments_anywhere_change_no_bit_of_an_advantage(name, n_masked):
    rng = random.Random(n_masked)
    samples = episodes_at_random(rng)
    without, _ = experience_of(name, samples)
    among, _ = experience_of(name, [with_masked(sample, n_masked, rng) for sample in samples])
    for field in ("rewards", "advantages", "returns"):
        expected = without.tensors()[field]
        computed = among.tensors()[field]
        assert torch.equal(computed[among.action_mask], expected[without.action_mask]), field
        assert not computed[~among.action_mask].any(), field
    assert without.advantages is not None and without.advantages.any()


def forked(sample, n_segments):
    """``sample`` as an episode in segments: each has the tokens so far, and actions of turns that none before has."""
    whole = sample.last
    cuts = [*[stop for _, stop in whole.spans[: n_segments - 1]], len(whole.token_ids)]
    segments = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        fresh = [is_action and i >= start for i, is_action in enumerate(whole.action_mask[:stop])]
        rewards = [
            reward * is_fresh for reward, is_fresh in zip(whole.token_rewards, fresh, strict=False)
        ]
        ends = [
            is_end and is_fresh for is_end, is_fresh in zip(whole.step_ends, fresh, strict=False)
        ]
        segments.append(
            replace(
                whole,
                token_ids=whole.token_ids[:stop],
                action_mask=fresh,
                log_probs=whole.log_probs[:stop],
                versions=whole.versions[:stop],
                token_rewards=rewards,
                step_ends=ends,
            )
        )
    episode = Episode([], Ending.COMPLETED, n_turns=len(whole.spans))
    return replace(sample, segments=segments, episode=episode)


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_each_segment_has_the_reward_of_its_whole_episode(n_segments):
    samples = episodes_at_random(random.Random(n_segments))
    in_segments = [forked(sample, n_segments) for sample in samples]
    assert [len(sample.segments) for sample in in_segments] == [n_segments] * len(samples)
    experience, metrics = experience_of("reinforce", in_segments)

    totals = [sample.total_reward({}) for sample in samples]
    assert [sample.total_reward({}) for sample in in_segments] == pytest.approx(totals)
    of_segments = [total for total in totals for _ in range(n_segments)]
    assert experience.scores.tolist() == pytest.approx(of_segments, abs=1e-6)
    assert metrics["reward"] == pytest.approx(statistics.fmean(totals), abs=1e-6)


@pytest.mark.parametrize(
    "name", [*(name for name in ESTIMATORS if name != "gae"), "reinforce by group"]
)
def test_an_episode_in_segments_counts_once_in_its_group(name):
    samples = [
        replace(sample, episode=Episode([], Ending.COMPLETED, n_turns=5))
        for sample in episodes_at_random(random.Random(5), n_turns=5)
    ]
    options = {}
    if "by group" in name:
        options = {"normalize_reward": "group"}
    name = name.removesuffix(" by group")
    whole, expected = experience_of(name, samples, coef=0, **options)
    for n_segments in (2, 3, 5):
        in_segments = [samples[0], forked(samples[1], n_segments), *samples[2:]]
        split, metrics = experience_of(name, in_segments, coef=0, **options)
        assert len(split) == len(samples) + n_segments - 1, "a row for each segment"
        expected_advantages, advantages = (x.advantages[x.action_mask] for x in (whole, split))
        assert advantages.tolist() == pytest.approx(expected_advantages.tolist(), abs=1e-6)
        assert {n: metrics[n] for n in metrics if "reward" in n} == pytest.approx(
            {n: expected[n] for n in expected if "reward" in n}, abs=1e-6
        )


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("n_segments", [1, 2, 3, 4, 5])
def test_each_token_has_the_same_weight_in_the_loss_however_an_episode_is_forked(
    loss_agg, n_segments
):
    samples = episodes_at_random(random.Random(n_segments), n_turns=5)

    def weights_of(samples):
        buffer = ReplayBuffer()
        buffer.append(collate(samples, 0))
        [step] = buffer.mini_batches(100, 100, epochs=1, seed=0)
        batch = collate(samples, 0)
        counts = step.n_tokens, step.n_sequences, 9
        return token_weights(batch.action_mask, loss_agg, *counts, batch.weight, batch.fraction)[
            batch.action_mask
        ]

    expected = weights_of(samples)
    assert expected.sum().item() == pytest.approx(
        len(expected) / (6 * 9) if loss_agg == "constant" else 1, abs=1e-6
    )
    in_segments = [forked(sample, n_segments) for sample in samples]
    assert weights_of(in_segments).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
