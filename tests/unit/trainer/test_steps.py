"""Gradients are those of one mean over the step, however it is cut; a critic asked once ends where it would have."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.datasets import TokenExample
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.own_estimator import loss_aggregation
from openppo.experience.replay_buffer import MiniBatch, idle_experience, join_rows
from openppo.models import Actor, GPTLMLoss, ScalarHeadModel
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.supervised.batches import token_batch
from openppo.trainer.train_state import TrainState
from openppo.trainer.update import OnePassUpdate, Update
from openppo.types import FinishReason, ModelInputs, Prompt, SingleProcess
from tests.ranks import on_ranks
from tests.samples import one_segment
from tests.unit.trainer.conftest import CPU, PPO, OneOf, PlainModel, Policy, Strategy

ALONE, TEMPERATURE = SingleProcess(), 0.7
CONFIG = from_options(
    TrainPPOConfig, **PPO, eps_clip=0.2, value_clip=0.2, ptx_coef=0.3, generate_max_len=8
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
    buffer.fill(rows)
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
    """A model of the actor."""
    return PlainModel(Actor(causal, temperature=TEMPERATURE))


def assert_same(found, expected):
    assert any(bool((gradient != 0).any()) for gradient in expected)
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=1e-6)


def norm_of(gradient):
    return torch.cat([g.flatten() for g in gradient]).norm().item()


def naive_rows(model, rows):
    """Of each row's action tokens, in float64 and without padding: loss, entropy, log-probs, and what is stored."""
    found = []
    for row in rows:
        places = [t for t in range(1, row.sequences.shape[1]) if row.action_mask[0, t]]
        if not places:
            continue
        distributions = torch.log_softmax(
            model(input_ids=row.sequences).logits[0] / TEMPERATURE, -1
        )
        log_probs = torch.stack([distributions[t - 1, row.sequences[0, t]] for t in places])
        entropy = torch.stack(
            [-(distributions[t - 1].exp() * distributions[t - 1]).sum() for t in places]
        )
        known = {
            name: row.tensors()[name][0, places]
            for name in ("log_probs", "advantages", "rollout_log_probs")
        }
        ratio = (log_probs - known["log_probs"]).exp()
        loss = -torch.min(ratio * known["advantages"], ratio.clamp(0.8, 1.2) * known["advantages"])
        found.append({"new": log_probs, "entropy": entropy, "loss": loss, **known})
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("role", ["actor", "actor with documents", "critic"])
def test_the_mean_gradient_of_all_ranks_is_the_gradient_of_one(
    world_size, role, actor, scalar, rows
):
    critic = PlainModel(ScalarHeadModel(scalar, "critic"))

    def gradient_of(batch, comm=ALONE):
        if role != "critic":
            return trained(
                actor, batch, documents(2, comm) if "documents" in role else None, comm=comm
            )[0]
        CriticStep(critic, CONFIG, comm, CPU).train(batch, Metrics())
        return critic.gradient

    n_tokens, of_ranks = sum(int(row.action_mask.sum()) for row in rows), []
    for rank in range(world_size):
        mine = rows[rank::world_size]
        batch = MiniBatch(
            [join_rows(mine[:1]), join_rows(mine[1:]), idle_experience()], n_tokens, 9
        )
        of_ranks.append(gradient_of(batch, OneOf(rank, world_size)))
    found = [sum(parts) / world_size for parts in zip(*of_ranks, strict=True)]
    assert_same(found, gradient_of(mini_batch(rows, 2)))


@pytest.mark.parametrize("micro", [1, 3, 100])
@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_gradient_is_that_of_the_mean_over_all_action_tokens(clip, micro, scalar, rows):
    losses = []
    for row in rows:
        outputs = scalar.score(scalar.base_model(input_ids=row.sequences).last_hidden_state)[
            0, :, 0
        ]
        for t in row.action_mask[0].nonzero()[:, 0].tolist():
            value, old, target = outputs[t - 1], row.values[0, t], row.returns[0, t]
            clipped = (
                value
                if clip is None
                else torch.minimum(torch.maximum(value, old - clip), old + clip)
            )
            losses.append(torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2)
    loss = sum(losses) / len(losses)
    expected = torch.autograd.grad(loss, list(scalar.parameters()))
    critic, metrics = PlainModel(ScalarHeadModel(scalar, "critic")), Metrics()
    CriticStep(critic, changed(value_clip=clip), ALONE, CPU).train(mini_batch(rows, micro), metrics)
    assert_same(critic.gradient, expected)
    named = {
        "value_loss": loss.item(),
        "critic_learning_rate": 0.25,
        "critic_grad_norm": norm_of(expected),
    }
    assert metrics.reduced(ALONE) == pytest.approx(named, abs=1e-6)


MEANS = {
    "token_mean": lambda of_rows: torch.cat(of_rows).mean(),
    "sequence_mean": lambda of_rows: torch.stack([each.mean() for each in of_rows]).mean(),
    "constant": lambda of_rows: torch.cat(of_rows).sum() / (9 * 8),  # of ten rows one has no action
}


def seen_otherwise(row):
    """Weights of tokens whose sampling probability lies near the old one, else 0."""
    weight = (row["log_probs"] - row["rollout_log_probs"]).exp()
    return torch.where((weight >= 0.01) & (weight <= 0.2), weight, 0.0)


def masked_shares(ratios, low, high):
    return {
        "masked_low_fraction": (ratios < low).double().mean().item(),
        "masked_high_fraction": (ratios > high).double().mean().item(),
    }


CORRECTION = {
    "rollout_correction": ("mis", "low=0.01", "high=0.2"),
}
KL = {"use_kl_loss": True, "init_kl_coef": 0.7}


@pytest.mark.parametrize("micro", [1, 3, 100])
@pytest.mark.parametrize(
    ("options", "term"),
    [
        *(({"loss_agg": name}, lambda row: row["loss"]) for name in MEANS),
        ({"entropy_coef": 0.3}, lambda row: row["loss"] - 0.3 * row["entropy"]),
        (
            KL | {"kl_estimator": "k2"},
            lambda row: row["loss"] + 0.7 * row["to_reference"].square() / 2,
        ),
        (
            KL | {"kl_estimator": "k3"},
            lambda row: (
                row["loss"] + 0.7 * (row["to_reference"].neg().expm1() + row["to_reference"])
            ),
        ),
        (CORRECTION, lambda row: row["loss"] * seen_otherwise(row)),
    ],
    ids=[*MEANS, "entropy", "k2", "k3", "rollout correction"],
)
def test_losses_and_metrics_are_those_of_a_loop_over_tokens(
    options, term, micro, causal, actor, rows
):
    naive = naive_rows(causal, rows)
    for row in naive:
        row["to_reference"] = row["new"] - 0.9 * row["log_probs"]
    terms, losses = [term(row) for row in naive], torch.cat([row["loss"] for row in naive])
    loss = MEANS[options.get("loss_agg", "token_mean")](terms)
    expected = torch.autograd.grad(loss, list(causal.parameters()), retain_graph=True)
    given = [row.with_fields(ref_log_probs=0.9 * row.log_probs) for row in rows]
    gradient, metrics = trained(
        actor, mini_batch(given, micro), None, changed(**options), kl_coef=0.7
    )
    assert_same(gradient, expected)
    ratios = torch.cat([row["new"] - row["log_probs"] for row in naive]).exp().tolist()
    named = {
        "policy_loss": losses.mean().item(),
        "actor_grad_norm": norm_of(expected),
        "actor_learning_rate": 0.25,
        "clip_fraction": sum(abs(r - 1) > 0.2 for r in ratios) / len(ratios),
        "ratio_max": max(ratios),
        "approx_kl": sum(r - 1 - math.log(r) for r in ratios) / len(ratios),
    }
    if options.get("use_kl_loss"):
        named["kl_loss"] = ((torch.cat(terms) - losses) / 0.7).mean().item()
    if "rollout_correction" in options:
        weights = torch.cat([seen_otherwise(row) for row in naive])
        named |= {
            "rollout_weight": weights.mean().item(),
            "rollout_masked_fraction": (weights == 0).float().mean().item(),
            **masked_shares(
                torch.cat([(row["log_probs"] - row["rollout_log_probs"]).exp() for row in naive]),
                0.01,
                0.2,
            ),
        }
        assert 0 < named["rollout_masked_fraction"] < 1
    assert metrics == pytest.approx(named, rel=1e-5, abs=1e-6)


def near_the_engine(row):
    ratio = (row["new"] - row["rollout_log_probs"]).exp()
    return torch.where(
        (ratio >= 0.8) & (ratio <= 1.28), -ratio * row["advantages"], 0.0
    ), ratio.detach()


def weighted_and_capped(row):
    k = (row["log_probs"] - row["rollout_log_probs"]).exp()
    return torch.where(k <= 5, k, 0.0) * row["loss"], k


def of_sequences(row):
    """The geometric mean inside the range, and no token below the veto."""
    ks = (row["log_probs"] - row["rollout_log_probs"]).exp()
    k = ks.prod() ** (1 / len(ks))
    return (k if 0.5 <= k <= 1.7 and ks.min() >= 0.1 else 0.0) * row["loss"], k.expand(len(ks))


GEOMETRIC = {
    "rollout_correction": "icepop low=0.5 high=1.7 level=geometric veto=0.1".split(),
}
OFF_POLICY = {
    "double sided": ({"policy_loss_type": "double_sided"}, near_the_engine),
    "decoupled": ({"policy_loss_type": "decoupled"}, weighted_and_capped),
    "geometric": (
        GEOMETRIC,
        of_sequences,
    ),
}
RANGES = {"double sided": (0.8, 1.28), "decoupled": (0, 5), "geometric": (0.5, 1.7)}


@pytest.mark.parametrize("micro", [1, 3, 100])
@pytest.mark.parametrize("name", OFF_POLICY)
def test_losses_of_older_samples_are_those_of_a_loop_over_tokens(name, micro, causal, actor, rows):
    options, term = OFF_POLICY[name]
    rows = [
        row.with_fields(rollout_log_probs=row.rollout_log_probs - 3.0 * row.action_mask)
        for row in rows
    ]
    terms, ratios = zip(*map(term, naive_rows(causal, rows)), strict=True)
    assert 0 < sum(int((each == 0).sum()) for each in terms) < len(torch.cat(terms))
    expected = torch.autograd.grad(torch.cat(terms).mean(), list(causal.parameters()))
    gradient, metrics = trained(actor, mini_batch(rows, micro), None, changed(**options))
    assert_same(gradient, expected)
    named = masked_shares(torch.cat(ratios), *RANGES[name])
    named = {key: value for key, value in named.items() if value > 0 or "high" in key}
    assert {
        key: value for key, value in metrics.items() if key.startswith("masked")
    } == pytest.approx(named)


def test_the_engines_distance_is_logged_by_staleness_where_it_was_not_before(actor, rows):
    stale = [
        row.with_fields(staleness=row.action_mask * (1.0 + i % 2)) for i, row in enumerate(rows)
    ]
    for batch, lags in ((stale, {"rollout_kl/lag_1", "rollout_kl/lag_2"}), (rows, set())):
        _, found = trained(actor, mini_batch(batch, 3), on_policy=True)
        assert {name for name in found if "lag" in name} == lags


@pytest.mark.parametrize("micro", [1, 2, 100])
def test_documents_add_the_language_model_loss_to_the_gradient(micro, causal, actor, rows):
    width = max(len(document.token_ids) for document in DOCUMENTS)
    ids, labels = (
        torch.zeros(len(DOCUMENTS), width, dtype=torch.int64),
        torch.full((len(DOCUMENTS), width), -100),
    )
    for b, document in enumerate(DOCUMENTS):
        for t, (token, counts) in enumerate(
            zip(document.token_ids, document.loss_mask, strict=True)
        ):
            ids[b, t], labels[b, t] = token, token if counts else -100
    logits = causal(input_ids=ids).logits  # at temperature 1
    language = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert GPTLMLoss()(logits, labels).item() == pytest.approx(language.item(), abs=1e-9)
    policy = torch.cat([row["loss"] for row in naive_rows(causal, rows)]).mean()
    expected = torch.autograd.grad(
        policy + CONFIG.ppo.ptx_coef * language, list(causal.parameters())
    )
    gradient, metrics = trained(actor, mini_batch(rows, 3), documents(micro))
    assert_same(gradient, expected)
    assert metrics["ptx_loss"] == pytest.approx(language.item(), abs=1e-6)


def test_a_step_without_any_action_has_gradient_zero(actor, rows):
    gradient, metrics = trained(actor, mini_batch([rows[5]], 1))
    assert all(bool((g == 0).all()) for g in gradient)
    assert "policy_loss" not in metrics


def test_an_algorithm_brings_its_own_normalization_unless_told_otherwise():
    """What each brings alone: tests/docs/test_examples.py."""
    dr_grpo = {"advantage_estimator": "dr_grpo"}
    assert (
        loss_aggregation(CONFIG)
        == loss_aggregation(changed(**dr_grpo, loss_agg="token_mean"))
        == "token_mean"
    )
    assert loss_aggregation(changed(**dr_grpo, policy_loss_type="gspo")) == "sequence_mean"


@pytest.mark.parametrize("on_policy", [True, False])
def test_missing_old_log_probs_are_those_of_the_forward_or_the_engine(on_policy, actor, rows):
    """Of the very weights that sampled the ratio is 1; those that have moved on are compared with the engine."""
    with torch.no_grad():
        own = [actor(row.inputs, row.action_mask) for row in rows]
    old = own if on_policy else [row.rollout_log_probs for row in rows]
    given = mini_batch(
        [row.with_fields(log_probs=each) for row, each in zip(rows, old, strict=True)], 3
    )
    expected, expected_metrics = trained(actor, given)
    missing = [row.with_fields(log_probs=None) for row in rows]
    gradient, found = trained(actor, mini_batch(missing, 3), on_policy=on_policy)
    assert_same(gradient, expected)
    assert {name: found[name] for name in expected_metrics} == pytest.approx(
        expected_metrics, abs=1e-5
    )
    assert not on_policy or (found["ratio_max"], found["clip_fraction"], found["approx_kl"]) == (
        1,
        0,
        0,
    )
    recomputed = [row.with_fields(entropy=torch.zeros_like(row.returns)) for row in rows]
    _, measured_before = trained(actor, mini_batch(recomputed, 3), on_policy=on_policy)
    assert ("rollout_kl" in found, "rollout_kl" in measured_before) == (on_policy, False), (
        "of sampling weights, once"
    )


ONE_PASS = {**PPO, "micro_train_batch_size": 3, "train_batch_size": 8}


def make_sample(i):
    ids = [(3 * i + t) % 20 for t in range(4 + i % 4)]
    mask = [t >= 2 and (t + i) % 4 != 0 for t in range(len(ids))]
    return one_segment(
        ids,
        mask,
        [-1.0 * m for m in mask],
        versions=[m - 1 for m in mask],
        finish_reason=FinishReason.STOP,
        prompt=Prompt("", ids[:2]),
        group=i,
        scores={"a": float(i % 3)},
    )


def update_of(one_pass, config, scalar, comm):
    """An update of both models, whose maker leaves values to it if ``one_pass``."""
    critic = PlainModel(ScalarHeadModel(copy.deepcopy(scalar), "critic"), rate=0.1)
    actor = PlainModel(Policy(), rate=0.1)
    parts = SimpleNamespace(
        strategy=Strategy(comm=comm),
        tokenizer=SimpleNamespace(pad_token_id=0),
        actor=actor,
        critic=critic,
        critic_step=CriticStep(critic, config, comm, CPU),
        maker=ExperienceMaker(
            actor, critic, None, config, comm, CPU, 0, values_in_training=one_pass
        ),
        data=SimpleNamespace(documents=[]),
        pack_documents_to=None,
        ema=None,
        state=TrainState(),
    )
    return Update.of(config, parts)


def outcome(one_pass, scalar, n, **options):
    """Experience, metrics, weights, and forwards of the critic of a global step."""
    config = from_options(TrainPPOConfig, **ONE_PASS, **options)
    update = update_of(one_pass, config, scalar, ALONE)
    buffer, metrics = ReplayBuffer(normalizes=True), Metrics()
    samples = Rollout(list(map(make_sample, range(n))), Metrics())
    buffer.fill(update.components.maker.make(samples, metrics))
    metrics = update(buffer, samples, metrics)
    fields = [item.tensors() for item in buffer.items]
    weights = [weight for model in update.models for weight in model.module.parameters()]
    return fields, metrics, weights, update.components.critic.n_forwards


@pytest.mark.parametrize("options", [{}, {"max_epochs": 2}, {"value_pretrain_steps": 1}], ids=str)
def test_values_advantages_weights_and_metrics_are_those_of_two_passes(options, scalar):
    plain, plain_metrics, plain_weights, n_plain = outcome(False, scalar, 8, **options)
    fields, metrics, weights, n_forwards = outcome(True, scalar, 8, **options)
    assert n_forwards < n_plain, "the forward that experience asks for is left out"
    torch.testing.assert_close(fields, plain, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(plain_metrics, abs=1e-6)


def test_a_rollout_of_several_optimizer_steps_is_made_as_usual(scalar):
    plain, plain_metrics, _, n_plain = outcome(False, scalar, 9)
    fields, metrics, _, n_forwards = outcome(True, scalar, 9)
    assert (n_forwards, metrics) == (n_plain, plain_metrics)
    assert all(torch.equal(a["values"], b["values"]) for a, b in zip(fields, plain, strict=True))


def test_it_is_not_chosen_where_the_training_forward_would_differ():
    assert OnePassUpdate.is_exact(from_options(TrainPPOConfig, **ONE_PASS))
    for options in (
        {"overlong_filter": True},
        {"lora_rank": 2, "lora_dropout": 0.1},
    ):
        assert not OnePassUpdate.is_exact(from_options(TrainPPOConfig, **ONE_PASS, **options)), (
            options
        )


def test_the_maker_leaves_values_to_the_update_and_trains_nothing(scalar):
    update = update_of(True, from_options(TrainPPOConfig, **ONE_PASS), scalar, ALONE)
    critic, maker = update.components.critic, update.components.maker
    before = copy.deepcopy(critic.module.state_dict())
    rows = maker.make(Rollout(list(map(make_sample, range(8))), Metrics()), Metrics())
    torch.testing.assert_close(critic.module.state_dict(), before, rtol=0, atol=0)
    assert (len(rows), critic.n_forwards) == (8, 0)
    assert {"values", "advantages", "returns"}.isdisjoint(rows[0].tensors())


def test_ranks_share_the_step_and_get_back_their_own_values(scalar):
    config = from_options(TrainPPOConfig, **ONE_PASS)
    samples = list(map(make_sample, range(7)))

    def work(comm):
        update = update_of(True, config, scalar, comm)
        share = Rollout(samples[:2] if comm.rank == 0 else samples[2:], Metrics())
        buffer, metrics = ReplayBuffer(comm), Metrics()
        buffer.fill(update.components.maker.make(share, metrics))
        update(buffer, share, metrics)
        return [item.values for item in buffer.items]

    values = [value for of_rank in on_ranks(2, work) for value in of_rank]
    critic = ScalarHeadModel(scalar, "critic")
    for sample, own_values in zip(samples, values, strict=True):
        ids = torch.tensor([sample.last.token_ids])
        expected = critic(ModelInputs(ids, torch.ones_like(ids).bool()))
        masked = torch.where(torch.tensor([sample.last.action_mask]), expected, 0.0)
        torch.testing.assert_close(own_values, masked, rtol=0, atol=1e-6, check_dtype=False)
