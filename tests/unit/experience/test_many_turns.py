"""An episode of several turns from scoring to the loss, by hand: nothing but the action mask says what is an action."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.measure import measure_mismatch, measure_staleness
from openppo.experience.replay_buffer import collate, join_rows
from openppo.models.loss import PolicyLoss, token_weights
from openppo.rollout.episodes import whole_rewards
from openppo.rollout.scores import write_scores
from openppo.tracking import Metrics
from openppo.types import Ending, Episode, FinishReason, Prompt, Score, SingleProcess, Trajectory


def episode(weight=1.0):
    """Prompt 3 4, action 5 6, three tokens of the environment, action 10 1."""
    actions = [False, False, True, True, False, False, False, True, True]
    log_probs, versions = (
        [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, 0.0, -3.0, -4.0],
        [-1, -1, 4, 4, -1, -1, -1, 5, 6],
    )
    lists = [3, 4, 5, 6, 7, 8, 9, 10, 1], actions, log_probs, versions
    return Trajectory(*lists, FinishReason.STOP, Prompt("ab", [3, 4]), group=0, weight=weight)


def single():
    """Prompt 3, action 5 1."""
    lists: Any = ([3, 5, 1], [False, True, True], [0.0, -1.0, -1.5], [-1, 6, 6])
    return Trajectory(*lists, FinishReason.STOP, Prompt("a", [3]), group=1)


def test_spans_and_rewards_are_those_of_action_tokens():
    sample = episode()
    assert (sample.spans, sample.action_ids) == ([(2, 4), (7, 9)], [5, 6, 10, 1])
    write_scores(
        [sample], [Score({"game": 2.0}, token_rewards=[9.0, 0, 0, 0.5, 9.0, 0, 0, 0.25, 0])]
    )
    assert sample.token_rewards == [0, 0, 0, 0.5, 0, 0, 0, 0.25, 0]
    assert (sample.total_reward({}), sample.step_rewards) == (2.75, [0, 0.5, 0.25, 0])
    with pytest.raises(ValueError, match="zip"):
        write_scores([sample], [Score(token_rewards=[1.0] * 4)])


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
    rows = [episode(weight=0.25), single(), episode(weight=0.75), episode(), episode(weight=0.0)]
    buffer = ReplayBuffer()
    buffer.append(collate(rows, pad_token_id=0))
    for micro in (1, 2, 5):
        [step] = buffer.mini_batches(5, micro, epochs=1, seed=0)
        counts = step.n_tokens, step.n_sequences
        assert counts == (0.25 * 4 + 2 + 0.75 * 4 + 4, 3.0)
        parts = [weighted_loss(part, loss_agg, *counts)[0] for part in step.micro_batches]
        assert sum(parts) == pytest.approx(
            weighted_loss(collate(rows, 0), loss_agg, *counts)[0], rel=1e-6
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


def made(name, trajectories, coef=0.1, **options):
    """Experiences of ``trajectories`` by an estimator, joined, and their metrics."""
    given = {
        "pretrain": "m",
        "prompt_data": "d",
        "reward_fn": "f",
        "advantage_estimator": name,
        "init_kl_coef": coef,
    }
    config = from_options(
        TrainPPOConfig, **given, n_samples_per_prompt=2, old_log_probs="rollout", **options
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
    buffer.fill(maker.make(trajectories, metrics))
    return join_rows(buffer.items), metrics.reduced(SingleProcess())


def episodes_at_random(rng, n=6, n_turns=3):
    """Episodes of three prompts, with a score and a reward at the end of each turn."""
    made = []
    for i in range(n):
        ids, mask, rewards = [3, 4], [False] * 2, [0.0] * 2
        for _ in range(n_turns):
            sampled, read = rng.randint(1, 4), rng.randint(1, 3)
            ids += [rng.randint(5, 99) for _ in range(sampled + read)]
            mask += [True] * sampled + [False] * read
            rewards += [0.0] * (sampled - 1) + [rng.uniform(-1, 1)] + [0.0] * read
        log_probs = [rng.uniform(-2, -1) * is_action for is_action in mask]
        lists: Any = ids, mask, log_probs, [0 if is_action else -1 for is_action in mask]
        t = Trajectory(
            *lists,
            FinishReason.STOP,
            Prompt("", [3, 4]),
            group=i // 2,
            scores={"won": rng.uniform(-1, 1)},
        )
        t.token_rewards, t.step_ends = rewards, [reward != 0 for reward in rewards]
        t.greedy = (dataclasses.replace(t, scores={"won": rng.uniform(-1, 1)}),)
        made.append(t)
    return made


def with_masked(t, n, rng):
    """``t`` with ``n`` tokens of an environment somewhere."""
    place, lists = (
        rng.randint(0, len(t.token_ids)),
        ("token_ids", "action_mask", "log_probs", "versions"),
    )
    fills = dict(
        zip((*lists, "token_rewards", "step_ends"), (77, False, 0.0, -1, 0.0, False), strict=True)
    )
    return dataclasses.replace(
        t,
        **{
            name: getattr(t, name)[:place] + [x] * n + getattr(t, name)[place:]
            for name, x in fills.items()
        },
    )


@pytest.mark.parametrize("n_masked", [1, 7, 500])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_of_environments_anywhere_change_no_bit_of_an_advantage(name, n_masked):
    rng = random.Random(n_masked)
    rows = episodes_at_random(rng)
    (without, _), (among, _) = (
        made(name, rows),
        made(name, [with_masked(t, n_masked, rng) for t in rows]),
    )
    for field in ("rewards", "advantages", "returns"):
        expected, found = without.tensors()[field], among.tensors()[field]
        assert torch.equal(found[among.action_mask], expected[without.action_mask]), field
        assert not found[~among.action_mask].any(), field
    assert without.advantages is not None and without.advantages.any()


def forked(t, n_segments):
    """``t`` as an episode in segments: each has the tokens so far, and is trained on the turns that none before has."""
    played, total = Episode([], Ending.COMPLETED, n_turns=len(t.spans)), sum(t.action_mask)
    cuts = [*[stop for _, stop in t.spans[: n_segments - 1]], len(t.token_ids)]
    segments = []
    for start, stop in zip([0, *cuts], cuts, strict=False):
        fresh = [is_action and i >= start for i, is_action in enumerate(t.action_mask[:stop])]
        lists: Any = t.token_ids[:stop], fresh, t.log_probs[:stop], t.versions[:stop]
        segment = Trajectory(
            *lists, t.finish_reason, t.prompt, t.group, fraction=sum(fresh) / total, scores=t.scores
        )
        segment.token_rewards = [
            reward * own for reward, own in zip(t.token_rewards, fresh, strict=False)
        ]
        segment.step_ends = [end and own for end, own in zip(t.step_ends, fresh, strict=False)]
        segment.greedy, segment.episode = t.greedy, played
        segments.append(segment)
    return segments


@pytest.mark.parametrize("n_segments", [1, 2, 3])
def test_each_segment_has_the_reward_of_its_whole_episode(n_segments):
    for whole in episodes_at_random(random.Random(n_segments)):
        segments = forked(whole, n_segments)
        assert whole_rewards(segments, {}) == pytest.approx([whole.total_reward({})] * n_segments)


@pytest.mark.parametrize(
    "name", [*(name for name in ESTIMATORS if name != "gae"), "reinforce by group"]
)
def test_an_episode_in_parts_counts_once_in_its_group(name):
    rows = episodes_at_random(random.Random(5), n_turns=5)
    for row in rows:
        row.episode = Episode([], Ending.COMPLETED, n_turns=5)
    options: Any = (
        {"normalize_reward": True, "reward_normalizer": "group"} if "by group" in name else {}
    )
    name = name.removesuffix(" by group")
    whole, expected = made(name, rows, coef=0, **options)
    for n_segments in (2, 3, 5):
        segments = [*rows[:1], *forked(rows[1], n_segments), *rows[2:]]
        split, metrics = made(name, segments, coef=0, **options)
        expected_of, found = (x.advantages[x.action_mask] for x in (whole, split))
        assert found.tolist() == pytest.approx(expected_of.tolist(), abs=1e-6)
        assert {n: metrics[n] for n in metrics if "reward" in n} == pytest.approx(
            {n: expected[n] for n in expected if "reward" in n}, abs=1e-6
        )


@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("n_segments", [1, 2, 3, 4, 5])
def test_each_token_has_the_same_weight_in_the_loss_however_an_episode_is_forked(
    loss_agg, n_segments
):
    rows = episodes_at_random(random.Random(n_segments), n_turns=5)

    def weights_of(trajectories):
        buffer = ReplayBuffer()
        buffer.append(collate(trajectories, 0))
        [step] = buffer.mini_batches(100, 100, epochs=1, seed=0)
        batch = collate(trajectories, 0)
        counts = step.n_tokens, step.n_sequences, 9
        return token_weights(batch.action_mask, loss_agg, *counts, batch.weight, batch.fraction)[
            batch.action_mask
        ]

    expected = weights_of(rows)
    assert expected.sum().item() == pytest.approx(
        len(expected) / (6 * 9) if loss_agg == "constant" else 1, abs=1e-6
    )
    segments = [segment for t in rows for segment in forked(t, n_segments)]
    assert weights_of(segments).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
