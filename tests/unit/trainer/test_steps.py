"""Gradients of actor and critic are those of one mean over the whole step, however the step is cut into pieces."""

import math

import pytest
import torch
from torch.nn import functional as F

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.datasets import TokenExample
from openppo.experience import ReplayBuffer
from openppo.experience.estimators import loss_aggregation
from openppo.experience.replay_buffer import MiniBatch, idle_experience, join_rows
from openppo.models import Actor, GPTLMLoss, ScalarHeadModel
from openppo.tracking import Metrics
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.supervised.batches import token_batch
from openppo.types import Experience, SingleProcess
from tests.unit.trainer.conftest import CPU, PPO, OneOf, PlainModel

ALONE = SingleProcess()
TEMPERATURE = 0.7
CONFIG = from_options(
    TrainPPOConfig,
    **PPO,
    **{"eps_clip": 0.2, "value_clip": 0.2, "ptx_coef": 0.3, "generate_max_len": 8},
)
DOCUMENTS = [
    TokenExample(token_ids=[3, 7, 9, 2], loss_mask=[True, True, True, True]),
    TokenExample(token_ids=[5, 2], loss_mask=[False, True]),
    TokenExample(token_ids=[8, 8, 1, 0, 12, 2], loss_mask=[False, True, False, True, True, True]),
    TokenExample(token_ids=[4, 11, 2], loss_mask=[False, False, False]),
    TokenExample(token_ids=[6, 13, 14, 15, 16, 17, 2], loss_mask=[False] + [True] * 6),
]


def changed(**options):
    return from_options(TrainPPOConfig, **(flat_dict(CONFIG) | options))


def mini_batch(rows, micro):
    buffer = ReplayBuffer()
    buffer.extend(rows)
    [batch] = buffer.mini_batches(len(rows), micro, epochs=1, seed=0)
    return batch


def documents(micro, comm=ALONE):
    return token_batch(DOCUMENTS, micro, 0, comm)


def trained(engine, batch, ptx=None, config=CONFIG, comm=ALONE, **given):
    """Gradient and metrics of one step of the actor."""
    metrics = Metrics()
    ActorStep(engine, config, comm, CPU).train(batch, ptx, metrics, **given)
    return engine.gradient, metrics.reduced(ALONE)


@pytest.fixture
def actor(causal):
    """An engine of the actor."""
    return PlainModel(Actor(causal, temperature=TEMPERATURE))


@pytest.fixture(params=["actor", "actor with documents", "critic"])
def step(request, actor, scalar):
    """``step(batch, micro)``: gradient and metrics of one optimizer step of each role."""
    critic = PlainModel(ScalarHeadModel(scalar, "critic"))

    def of_role(batch, micro, comm=ALONE):
        if request.param != "critic":
            return trained(actor, batch, documents(micro, comm) if "documents" in request.param else None, comm=comm)
        metrics = Metrics()
        CriticStep(critic, CONFIG, comm, CPU).train(batch, metrics)
        return critic.gradient, metrics.reduced(ALONE)

    return of_role


def assert_same(found, expected):
    assert any(bool((gradient != 0).any()) for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def naive_gradient(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradient


def naive_rows(model, rows):
    """Of each row's action tokens, in float64 and without padding: loss, entropy, log-probs, and what is stored."""
    found = []
    for row in rows:
        places = [t for t in range(1, row.sequences.shape[1]) if row.action_mask[0, t]]
        if not places:
            continue
        distributions = torch.log_softmax(model(input_ids=row.sequences).logits[0] / TEMPERATURE, -1)
        log_probs = torch.stack([distributions[t - 1, row.sequences[0, t]] for t in places])
        entropy = torch.stack([-(distributions[t - 1].exp() * distributions[t - 1]).sum() for t in places])
        known = {name: row.tensors()[name][0, places] for name in ("log_probs", "advantages", "rollout_log_probs")}
        ratio = (log_probs - known["log_probs"]).exp()
        loss = -torch.min(ratio * known["advantages"], ratio.clamp(0.8, 1.2) * known["advantages"])
        found.append({"new": log_probs, "entropy": entropy, "loss": loss, **known})
    return found


def without_advantage(rows):
    """Their policy gradient is zero, so that only the documents are left."""
    return [row.with_fields(advantages=torch.zeros_like(row.advantages)) for row in rows]


def test_gradient_is_the_same_for_any_micro_batch_size(step, rows):
    whole, whole_metrics = step(mini_batch(rows, 100), 100)
    for micro in (1, 3, 8):
        gradient, metrics = step(mini_batch(rows, micro), micro)
        assert_same(gradient, whole)
        assert metrics == pytest.approx(whole_metrics, abs=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_mean_gradient_of_all_ranks_is_the_gradient_of_one(world_size, step, rows):
    whole, _ = step(mini_batch(rows, 2), 2)
    n_tokens = sum(int(row.action_mask.sum()) for row in rows)
    of_ranks = []
    for rank in range(world_size):
        mine = rows[rank::world_size]
        batch = MiniBatch([join_rows(mine[:1]), join_rows(mine[1:]), idle_experience()], n_tokens, 9)
        of_ranks.append(step(batch, 2, OneOf(rank, world_size))[0])
    assert_same([sum(parts) / world_size for parts in zip(*of_ranks, strict=True)], whole)


def test_extra_padding_columns_do_not_change_the_gradient(step, rows):
    batch = mini_batch(rows, 4)

    def wide(name, tensor):
        filler = {"sequences": 13, "attention_mask": False, "action_mask": False}.get(name, 7.5)
        return tensor if tensor.dim() == 1 else F.pad(tensor, (0, 9), value=filler)

    widened = [Experience(**{n: wide(n, t) for n, t in micro.tensors().items()}) for micro in batch.micro_batches]
    narrow, narrow_metrics = step(batch, 4)
    gradient, metrics = step(MiniBatch(widened, batch.n_tokens, batch.n_sequences), 4)
    assert_same(gradient, narrow)
    assert metrics == pytest.approx(narrow_metrics, abs=1e-6)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_gradient_is_that_of_the_mean_over_all_action_tokens(clip, scalar, rows):
    losses = []
    for row in rows:
        outputs = scalar.score(scalar.base_model(input_ids=row.sequences).last_hidden_state)[0, :, 0]
        for t in row.action_mask[0].nonzero()[:, 0].tolist():
            value, old, target = outputs[t - 1], row.values[0, t], row.returns[0, t]
            clipped = value if clip is None else torch.minimum(torch.maximum(value, old - clip), old + clip)
            losses.append(torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2)
    loss = sum(losses) / len(losses)
    expected = naive_gradient(scalar, loss)
    engine, metrics = PlainModel(ScalarHeadModel(scalar, "critic")), Metrics()
    CriticStep(engine, changed(value_clip=clip), ALONE, CPU).train(mini_batch(rows, 3), metrics)
    assert_same(engine.gradient, expected)
    assert metrics.reduced(ALONE) == {
        "value_loss": pytest.approx(loss.item(), abs=1e-6),
        "critic_learning_rate": 0.25,
        "critic_grad_norm": pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item()),
    }


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_the_gradient_of_documents_is_that_of_the_language_model_loss(micro, causal, rows):
    width = max(len(document.token_ids) for document in DOCUMENTS)
    ids, labels = torch.zeros(len(DOCUMENTS), width, dtype=torch.int64), torch.full((len(DOCUMENTS), width), -100)
    for b, document in enumerate(DOCUMENTS):
        for t, (token, counts) in enumerate(zip(document.token_ids, document.loss_mask, strict=True)):
            ids[b, t], labels[b, t] = token, token if counts else -100
    logits = causal(input_ids=ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert GPTLMLoss()(logits, labels).item() == pytest.approx(loss.item(), abs=1e-9)
    expected = naive_gradient(causal, CONFIG.ppo.ptx_coef * loss)
    for temperature in (0.3, 2.0):  # of sampling, which has nothing to do with documents
        engine = PlainModel(Actor(causal, temperature=temperature))
        gradient, metrics = trained(engine, mini_batch(without_advantage(rows), 3), documents(micro))
        assert_same(gradient, expected)
        assert metrics["ptx_loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_the_two_losses_are_added_in_one_gradient(actor, rows):
    policy, _ = trained(actor, mini_batch(rows, 4))
    language, _ = trained(actor, mini_batch(without_advantage(rows), 4), documents(4))
    both, _ = trained(actor, mini_batch(rows, 4), documents(4))
    assert_same(both, [p + d for p, d in zip(policy, language, strict=True)])


def test_clip_fraction_ratio_and_kl_are_those_of_the_ratios(causal, actor, rows):
    with torch.no_grad():
        changes = [row["new"] - row["log_probs"] for row in naive_rows(causal, rows)]
    ratios = torch.cat(changes).exp().tolist()
    _, metrics = trained(actor, mini_batch(rows, 4))
    assert metrics["clip_fraction"] == pytest.approx(sum(abs(r - 1) > 0.2 for r in ratios) / len(ratios))
    assert metrics["ratio_max"] == pytest.approx(max(ratios), abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(ratios))


def test_a_step_without_any_action_has_gradient_zero(actor, rows):
    gradient, metrics = trained(actor, mini_batch([rows[5]], 1))
    assert all(bool((g == 0).all()) for g in gradient)
    assert "policy_loss" not in metrics


@pytest.mark.parametrize("micro", [1, 3, 100])
@pytest.mark.parametrize("loss_agg", ["token_mean", "sequence_mean", "constant"])
def test_losses_add_up_as_asked_for_any_micro_batch_size(loss_agg, micro, causal, actor, rows):
    losses = [row["loss"] for row in naive_rows(causal, rows)]
    assert len(losses) == 9  # one of ten rows has no action
    expected = {
        "token_mean": torch.cat(losses).mean(),
        "sequence_mean": torch.stack([loss.mean() for loss in losses]).mean(),
        "constant": torch.cat(losses).sum() / (9 * 8),
    }[loss_agg]
    gradient, metrics = trained(actor, mini_batch(rows, micro), None, changed(loss_agg=loss_agg))
    naive = naive_gradient(causal, expected)
    assert_same(gradient, naive)
    assert metrics["policy_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)
    assert metrics["actor_grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in naive]).norm().item())
    assert metrics["actor_learning_rate"] == 0.25


def test_the_entropy_bonus_raises_the_mean_entropy(causal, actor, rows):
    loss = torch.cat([row["loss"] - 0.3 * row["entropy"] for row in naive_rows(causal, rows)]).mean()
    gradient, _ = trained(actor, mini_batch(rows, 3), None, changed(entropy_coef=0.3))
    assert_same(gradient, naive_gradient(causal, loss))


@pytest.mark.parametrize(
    ("estimator", "formula"), [("k2", lambda x: x.square() / 2), ("k3", lambda x: (-x).exp() - 1 + x)]
)
def test_the_kl_loss_is_weighted_by_the_coefficient_of_the_step(estimator, formula, causal, actor, rows):
    rows = [row.with_fields(ref_log_probs=row.log_probs * 0.9) for row in rows]
    naive = naive_rows(causal, rows)
    kl = torch.cat([formula(row["new"] - row["log_probs"] * 0.9) for row in naive])
    loss = torch.cat([row["loss"] for row in naive]).mean() + 0.7 * kl.mean()
    config = changed(use_kl_loss=True, kl_estimator=estimator)
    gradient, metrics = trained(actor, mini_batch(rows, 4), None, config, kl_coef=0.7)
    assert_same(gradient, naive_gradient(causal, loss))
    assert metrics["kl_loss"] == pytest.approx(kl.mean().item(), abs=1e-5)


def test_tokens_that_the_engine_saw_otherwise_weigh_less(causal, actor, rows):
    parts, masked = [], []
    for row in naive_rows(causal, rows):
        k = (row["log_probs"] - row["rollout_log_probs"]).exp()
        inside = (k >= 0.01) & (k <= 0.2)
        parts.append(torch.where(inside, k, 0.0) * row["loss"])
        masked.append(~inside)
    assert 0 < torch.cat(masked).float().mean() < 1
    options = {"rollout_correction": "mis", "rollout_correction_low": 0.01, "rollout_correction_high": 0.2}
    gradient, metrics = trained(actor, mini_batch(rows, 3), None, changed(**options))
    assert_same(gradient, naive_gradient(causal, torch.cat(parts).mean()))
    assert metrics["rollout_masked_fraction"] == pytest.approx(torch.cat(masked).float().mean().item())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "token_mean"),
        ({"policy_loss_type": "gspo"}, "sequence_mean"),
        ({"advantage_estimator": "dr_grpo"}, "constant"),
        ({"advantage_estimator": "dr_grpo", "policy_loss_type": "gspo"}, "sequence_mean"),
        ({"advantage_estimator": "dr_grpo", "loss_agg": "token_mean"}, "token_mean"),
    ],
    ids=str,
)
def test_an_algorithm_brings_its_own_normalization_unless_told_otherwise(options, expected):
    assert loss_aggregation(changed(**options)) == expected


@pytest.mark.parametrize(("on_policy", "recomputed"), [(True, False), (False, False), (True, True)])
def test_the_mismatch_is_measured_on_sampling_weights_without_recomputed_log_probs(on_policy, recomputed, actor, rows):
    with torch.no_grad():
        own = [actor(row.sequences, row.attention_mask, row.action_mask) for row in rows]
    rows = [row.with_fields(rollout_log_probs=each - 0.25) for row, each in zip(rows, own, strict=True)]
    if recomputed:
        rows = [row.with_fields(entropy=torch.zeros_like(row.returns)) for row in rows]
    _, metrics = trained(actor, mini_batch(rows, 2), on_policy=on_policy)
    measured = on_policy and not recomputed
    assert metrics.get("rollout_log_prob_gap") == (pytest.approx(0.25, abs=1e-5) if measured else None)


@pytest.mark.parametrize("on_policy", [True, False])
def test_old_log_probs_that_are_missing_are_those_of_the_forward_or_the_engines(on_policy, actor, rows):
    """Of the very weights that sampled the ratio is 1; those that have moved on are compared with the engine."""
    with torch.no_grad():
        own = [actor(row.sequences, row.attention_mask, row.action_mask) for row in rows]
    old = own if on_policy else [row.rollout_log_probs for row in rows]
    given = mini_batch([row.with_fields(log_probs=each) for row, each in zip(rows, old, strict=True)], 3)
    expected, expected_metrics = trained(actor, given)
    missing = [Experience(**{n: t for n, t in row.tensors().items() if n != "log_probs"}) for row in rows]
    gradient, found = trained(actor, mini_batch(missing, 3), on_policy=on_policy)
    assert_same(gradient, expected)
    assert {name: found[name] for name in expected_metrics} == pytest.approx(expected_metrics, abs=1e-5)
    if on_policy:
        assert found["ratio_max"] == 1
        assert found["clip_fraction"] == found["approx_kl"] == 0
        assert "rollout_kl" in found, "the difference is always logged"
