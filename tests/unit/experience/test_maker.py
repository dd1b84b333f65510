"""The experience maker: what each model contributes, and that batching and ranks leave no trace."""

import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.config.resolved import Resolved
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.hooks import Hooks
from openppo.experience.replay_buffer import join_rows
from openppo.models import Actor, ScalarHeadModel, dealing
from openppo.models.sampled_ids import SampledIds
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import Ending, Episode, Experience, FinishReason, Prompt, SingleProcess
from tests.samples import with_last

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MODEL = LlamaConfig(vocab_size=20, num_labels=1, pad_token_id=None, initializer_range=0.3, **SIZES)
END = 2
TIGHT = 1e-6
KL_COEF, GAMMA, LAMBD = 0.2, 0.9, 0.8
CONFIG = from_options(
    TrainPPOConfig,
    **{
        "pretrain": "m",
        "prompt_data": "d",
        "reward_fn": "f.py",
        "init_kl_coef": KL_COEF,
        "gamma": GAMMA,
    },
    **{
        "lambd": LAMBD,
        "reward_clip_range": (-1.0, 1.5),
        "micro_rollout_batch_size": 2,
        "generate_max_len": 8,
    },
    old_log_probs="recompute",
)


def made_with_seed(kind, seed):
    torch.manual_seed(seed)
    return kind(MODEL).double().eval()


POLICY, CRITIC, REFERENCE = (
    made_with_seed(kind, seed)
    for seed, kind in (
        (1, LlamaForCausalLM),
        (2, LlamaForSequenceClassification),
        (3, LlamaForCausalLM),
    )
)
MODELS: dict[str, Any] = {
    "actor": Actor(POLICY, temperature=0.7),
    "critic": ScalarHeadModel(CRITIC, "critic"),
    "reference": Actor(REFERENCE, temperature=0.7),
}


@pytest.fixture
def samples(make_sample):
    """Of different lengths, not in order of length; with holes, cut by length, ended at once."""
    return [
        make_sample([5, END], [6, 7, END], score=0.75),
        make_sample(
            [8, 9, 10],
            [11, 12, 13, 14, 15, END],
            [1, 0, 0, 1, 1, 0],
            FinishReason.LENGTH,
            score=3.0,
        ),
        make_sample([4], [END], score=-2.0),
        make_sample([4, 5, 6, 7], [8, 9], reason=FinishReason.LENGTH, score=0.5),
        make_sample([END, 3], [END], score=1.0),
    ]


def maker(models=None, **options):
    config = from_options(TrainPPOConfig, **(flat_dict(CONFIG) | options))
    where = SingleProcess(), torch.device("cpu")
    return ExperienceMaker(*(MODELS | (models or {})).values(), config, *where, pad_token_id=END)


def make(samples, models=None, **options):
    """Experiences, and the metrics."""
    metrics = Metrics()
    made = maker(models, **options).make(samples, metrics)
    return made, metrics.reduced(SingleProcess())


def actions_of(sample):
    return [t for t, is_action in enumerate(sample.last.action_mask) if is_action]


def k3_by_hand(x):
    return math.exp(-x) - 1 + x


@torch.no_grad()
def expected_fields(sample, estimator="k1"):
    """Everything the maker adds, one token after the other, in float64."""
    token_ids = sample.last.token_ids
    ids, n, actions = torch.tensor([token_ids]), len(token_ids), actions_of(sample)
    named = {name: [0.0] * n for name in ("log_probs", "ref_log_probs", "values", "entropy")}
    named |= {name: [0.0] * n for name in ("rewards", "advantages", "returns")}
    distributions = {
        "log_probs": (POLICY(input_ids=ids).logits[0] / 0.7).log_softmax(-1),
        "ref_log_probs": (REFERENCE(input_ids=ids).logits[0] / 0.7).log_softmax(-1),
    }
    outputs = CRITIC.score(CRITIC.base_model(input_ids=ids).last_hidden_state)[0, :, 0]
    score = max(-1.0, min(1.5, sample.scores["score"]))
    for t in actions:
        for name, distribution in distributions.items():
            named[name][t] = distribution[t - 1, token_ids[t]].item()
        named["values"][t] = outputs[t - 1].item()
        named["entropy"][t] = (
            torch.distributions.Categorical(logits=distributions["log_probs"][t - 1])
            .entropy()
            .item()
        )
        kl = named["log_probs"][t] - named["ref_log_probs"][t]
        named["rewards"][t] = -KL_COEF * kl + score * (t == actions[-1])
    next_value = next_advantage = 0.0
    for t in reversed(actions):
        value = named["values"][t]
        next_advantage = (
            named["rewards"][t] + GAMMA * next_value - value + GAMMA * LAMBD * next_advantage
        )
        named["advantages"][t], named["returns"][t], next_value = (
            next_advantage,
            next_advantage + value,
            value,
        )
    return named


def test_every_field_equals_a_loop_over_tokens(samples):
    made, _ = make(samples)
    for sample, experience in zip(samples, made, strict=True):
        segment = sample.last
        tensors = experience.tensors()
        assert not any(tensor.requires_grad for tensor in tensors.values())
        for name, expected in expected_fields(sample).items():
            assert tensors[name][0].tolist() == pytest.approx(expected, abs=2 * TIGHT), name
        assert (experience.sequences.tolist(), tensors["action_mask"].tolist()) == (
            [segment.token_ids],
            [segment.action_mask],
        )
        assert tensors["rollout_log_probs"][0].tolist() == segment.log_probs
        assert tensors["scores"].tolist() == [sample.scores["score"]]
        assert tensors["truncated"].tolist() == [segment.finish_reason is FinishReason.LENGTH]


def test_metrics_are_means_over_tokens_or_over_responses(samples):
    whole, found = make(samples)
    for size in (1, 3, 100):
        made, metrics = make(samples, micro_rollout_batch_size=size)
        assert metrics == pytest.approx(found, abs=TIGHT), (
            "the size of a forward pass does not matter"
        )
        for mine, other in zip(made, whole, strict=True):
            torch.testing.assert_close(mine.tensors(), other.tensors(), rtol=0, atol=TIGHT)
    tokens = [
        (sample.last, expected_fields(sample), t) for sample in samples for t in actions_of(sample)
    ]
    kls = [fields["log_probs"][t] - fields["ref_log_probs"][t] for _, fields, t in tokens]
    gaps = [abs(fields["log_probs"][t] - segment.log_probs[t]) for segment, fields, t in tokens]
    n_tokens = len(tokens)
    chances = [
        abs(math.exp(fields["log_probs"][t]) - math.exp(segment.log_probs[t]))
        for segment, fields, t in tokens
    ]
    extremes = {
        **{
            name: [fields[name][t] for _, fields, t in tokens] for name in ("advantages", "returns")
        },
        "reward": [0.75, 3.0, -2.0, 0.5, 1.0],
        "prompt_length": [2, 3, 1, 4, 2],
    }
    expected = {
        **{f"{name}_max": max(values) for name, values in extremes.items()},
        **{f"{name}_min": min(values) for name, values in extremes.items()},
        "prompt_length": 12 / 5,
        "rollout_prob_gap": statistics.mean(chances),
        "rollout_prob_gap_max": max(chances),
        "rollout_prob_gap_std": statistics.pstdev(chances),
        "kl": sum(kls) / n_tokens,
        "kl_per_response": sum(kls) / 5,
        "kl_k3": sum(k3_by_hand(x) for x in kls) / n_tokens,
        "reward": (0.75 + 3.0 - 2.0 + 0.5 + 1.0) / 5,
        "response_length": n_tokens / 5,
        "truncated_fraction": 2 / 5,
        "rollout_log_prob_gap": sum(gaps) / n_tokens,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize(
    "options", [{"models": {"reference": None}}, {"use_kl_loss": True, "kl_estimator": "k3"}]
)
def test_without_a_reference_or_with_a_kl_loss_rewards_hold_no_kl(samples, options):
    made, metrics = make(samples, **options)
    for sample, experience in zip(samples, made, strict=True):
        expected = [0.0] * len(sample.last.token_ids)
        expected[actions_of(sample)[-1]] = max(-1.0, min(1.5, sample.scores["score"]))
        assert experience.rewards[0].tolist() == expected
        assert (experience.ref_log_probs is None) == ("models" in options)
    assert bool({"kl", "kl_k3", "kl_per_response"} & set(metrics)) == ("models" not in options)


def test_named_scores_are_weighted_and_logged_one_by_one(make_sample):
    samples = [
        make_sample([5], [6, END], right=1.0, brief=4.0),
        make_sample([5], [7, END], right=0.0, brief=2.0),
    ]
    made, found = make(samples, {"reference": None}, reward_weights=("brief=-0.25",))
    assert [e.rewards[0, -1].item() for e in made] == pytest.approx([0.0, -0.5], abs=1e-6)
    assert (found["reward"], found["reward/right"], found["reward/brief"]) == (
        pytest.approx(-0.25),
        0.5,
        3.0,
    )


def test_extras_and_sources_are_metrics_of_their_own(make_sample):
    samples, of = [], {"d/a.jsonl": "a.jsonl", "d/b.jsonl": "b.jsonl"}
    for score, source, extras in (
        (1.0, "d/a.jsonl", {"n": 8.0}),
        (0.0, "d/b.jsonl", {}),
        (0.5, "d/b.jsonl", {"n": 2}),
    ):
        sample = make_sample(
            [5],
            [6] * int(2 * score) + [END],
            reason=FinishReason.LENGTH if score else FinishReason.STOP,
        )
        samples.append(
            dataclasses.replace(
                sample, prompt=Prompt("", [5], source=source), scores={"won": score}, extras=extras
            )
        )
    one, metrics = maker({"reference": None}), Metrics()
    one.hooks = Hooks(sources=of)
    one.make(samples, metrics)
    found = metrics.reduced(SingleProcess())
    expected = {
        "reward": 0.5,
        "extra/n": 5.0,
        "source/a.jsonl/reward": 1.0,
        "source/a.jsonl/reward_std": 0.0,
    }
    expected |= {
        "source/a.jsonl/extra/n": 8.0,
        "source/b.jsonl/reward": 0.25,
        "source/b.jsonl/reward_std": 0.25,
    }
    expected |= {"source/b.jsonl/reward/won": 0.25, "source/b.jsonl/extra/n": 2.0}
    expected |= {"source/a.jsonl/response_length": 3.0, "source/b.jsonl/response_length": 1.5}
    expected |= {"source/a.jsonl/truncated_fraction": 1.0, "source/b.jsonl/truncated_fraction": 0.5}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    for sources in ({}, {"d/b.jsonl": "b.jsonl"}):
        one.hooks, metrics = Hooks(sources=sources), Metrics()
        one.make(samples, metrics)
        assert not any(name.startswith("source/") for name in metrics.reduced(SingleProcess())), (
            "nor is a single one"
        )


def test_responses_that_were_cut_off_are_penalized_and_left_out_of_the_losses(samples):
    options = {
        "overlong_filter": True,
        "missing_eos_penalty": 0.25,
        "reward_clip_range": (-10.0, 10.0),
    }
    made, found = make(samples, {"reference": None}, **options)
    for sample, experience in zip(samples, made, strict=True):
        segment = sample.last
        truncated = segment.finish_reason is FinishReason.LENGTH
        assert experience.action_mask.tolist() == [
            [False] * len(segment.token_ids) if truncated else segment.action_mask
        ]
        assert experience.rewards.sum().item() == sample.scores["score"] - 0.25 * truncated
    assert found["shaped_reward"] == pytest.approx((0.75 + 3.0 - 2.0 + 0.5 + 1.0 - 0.5) / 5)
    assert found["response_length"] == sum(len(actions_of(sample)) for sample in samples) / 5


def test_a_batch_moves_whole_not_row_by_row(samples, monkeypatch):
    moved: list[int] = []
    to = Experience.to
    monkeypatch.setattr(
        Experience, "to", lambda self, device: moved.append(len(self)) or to(self, device)
    )
    made, _ = make(samples)
    assert moved == [5, 5], "to the models, then to the host"
    ReplayBuffer().append(join_rows(made))
    assert moved == [5, 5, 5]


def test_monte_carlo_returns_while_only_the_critic_learns(samples):
    ours = maker(gamma=1.0, value_pretrain_steps=1)
    before, after = (ours.make(samples, Metrics(), n_done=n) for n in (0, 1))
    for experience in before:
        to_go = torch.where(
            experience.action_mask, experience.rewards.flip(-1).cumsum(-1).flip(-1), 0.0
        )
        torch.testing.assert_close(experience.returns, to_go, rtol=0, atol=1e-5)
    assert not torch.equal(after[0].returns, before[0].returns)


@pytest.mark.parametrize(("share", "prompts"), [("auto", [(0, 3), (7, 2)]), ("off", [])])
def test_forwards_are_dealt_by_groups_where_prompts_are_shared(
    make_sample, monkeypatch, share, prompts
):
    class Dealt(dealing.Deal):
        def __init__(self, lengths, comm, given=()):
            seen.append(list(given))
            super().__init__(lengths, comm, given)

    seen: list[list[tuple[int, int]]] = []
    monkeypatch.setattr("openppo.experience.forwards.Deal", Dealt)
    samples = [
        make_sample([3, 4, 5], [6, 7]),
        dataclasses.replace(make_sample([3, 4], [6]), group=7),
    ]
    make(samples, share_prompts=share)
    assert seen == [prompts]


def test_the_engines_log_probs_stand_for_the_actors_where_asked(samples):
    """No forward of the actor: KL, advantages and an estimate of the entropy follow from the engine's log-probs."""
    made, found = make(
        samples, {"actor": lambda *_, **__: pytest.fail("it runs")}, old_log_probs="rollout"
    )
    sampled = [sample.last.log_probs[t] for sample in samples for t in actions_of(sample)]
    assert torch.cat([e.log_probs[e.action_mask] for e in made]).tolist() == pytest.approx(sampled)
    assert all(e.entropy is None and not e.log_probs[~e.action_mask].any() for e in made)
    assert all(torch.equal(a.values, b.values) for a, b in zip(made, make(samples)[0], strict=True))
    assert found["entropy"] == pytest.approx(-sum(sampled) / len(sampled))
    assert not [name for name in found if name.startswith("rollout_")], "no mismatch is claimed"


def fake_models(calls):
    return {
        "actor": lambda inputs, actions, **_: (
            calls.append("actor") or (actions * -2.0, actions * 1.0)
        ),
        "reference": None,
        "critic": lambda inputs: inputs.attention_mask * 1.0,
    }


@pytest.mark.parametrize(
    ("n_samples", "options", "source"),
    [
        (4, {}, "rollout"),
        (4, {"min_new_tokens": 1}, "recompute"),
        (3, {"bf16": True}, "training"),
        (5, {"bf16": True}, "recompute"),  # several optimizer steps
        (4, {"bf16": True, "freezing_actor_steps": 1}, "recompute"),  # the actor is not trained
    ],
)
def test_where_old_log_probs_come_from(n_samples, options, source, make_sample):
    calls: list[str] = []
    samples = [make_sample([5], [6, END], score=1.0) for _ in range(n_samples)]
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "old_log_probs": "auto"}
    one = maker(models=fake_models(calls), **sizes | options)
    made = one.make(Rollout(samples, Metrics()), Metrics())
    assert bool(calls) == (source == "recompute")
    log_probs = {"rollout": [0.0, -0.625, -0.75], "recompute": [0.0, -2.0, -2.0], "training": None}[
        source
    ]
    assert [e.log_probs if e.log_probs is None else e.log_probs[0].tolist() for e in made] == [
        log_probs
    ] * n_samples
    episode = Episode([], Ending.COMPLETED, 1)
    of_agent = [
        dataclasses.replace(sample, episode=episode) for sample in samples
    ]  # what the engine batches depends on timing
    others = [one.make(samples, Metrics()), one.make(Rollout(of_agent, Metrics()), Metrics())]
    if source == "training":
        others.append(one.make(Rollout(samples, Metrics()), Metrics(), n_done=1))  # stale
    for made in others:
        assert [e.log_probs[0].tolist() for e in made] == [[0.0, -2.0, -2.0]] * n_samples, (
            "recomputed"
        )


@pytest.mark.parametrize("n_done", [0, 2])
@pytest.mark.parametrize(("loss", "forwards"), [("double_sided", 0), ("decoupled", 2)])
def test_double_sided_makes_no_forward_and_decoupled_one_for_each_batch(
    loss, forwards, n_done, make_sample
):
    calls: list[str] = []
    samples = [make_sample([5], [6, END], score=1.0) for _ in range(4)]  # two batches
    one, metrics = (
        maker(models=fake_models(calls), old_log_probs="auto", policy_loss_type=loss),
        Metrics(),
    )
    made = one.make(samples, metrics, n_done)
    assert calls == ["actor"] * forwards
    old = [0.0, -2.0, -2.0] if forwards else [0.0, -0.625, -0.75]
    assert [e.log_probs[0].tolist() for e in made] == [old] * 4
    staleness = [None if e.staleness is None else e.staleness[0].tolist() for e in made]
    assert staleness == [[0.0, 2.0, 2.0] if n_done else None] * 4
    found = metrics.reduced(SingleProcess())
    assert found["staleness"] == found["staleness_max"] == n_done
    assert ("rollout_kl/lag_2" in found) == (forwards > 0 and n_done > 0)


def test_scores_under_way_are_awaited_after_the_models_have_run(make_sample):
    events: list[str] = []
    sample = make_sample([5], [6, END])
    measured = Metrics()
    metrics = Metrics()

    def take_scored():
        events.append("scores")
        measured.add("reward_errors", 3, reduce="sum")
        return [sample.with_scores({"score": 1.0})]

    rollout = Rollout([sample], measured, take_scored)
    made = maker(models=fake_models(events)).make(rollout, metrics)
    assert events == ["actor", "scores"]
    assert made[0].scores.tolist() == [1.0]
    assert metrics.reduced(SingleProcess())["reward_errors"] == 3, (
        "what the source has measured is in the metrics"
    )


@pytest.mark.parametrize(
    ("token_id", "why"), [(17, "the tokenizer does not know it"), (6, "it stands for images")]
)
def test_actions_that_are_never_sampled_are_refused(token_id, why, make_sample):
    ids = SampledIds((range(6, 7), range(15, 20)), {6: "image"})
    made = maker()
    made.hooks = dataclasses.replace(made.hooks, sampled_ids=ids)
    samples = [
        make_sample([5, END], [7, END], score=1.0),
        make_sample([token_id, 4], [8, token_id, END], score=1.0),
    ]
    with pytest.raises(ValueError) as error:
        made.make(samples, Metrics())
    assert str(error.value) == (
        f"token 3 of a sample is trained on, but the id {token_id} is never sampled, as {why}. Set its action_mask to "
        "False, or, if it is an EOS or stop token, add it to the tokenizer."
    )
    samples[1] = with_last(samples[1], action_mask=[False, False, True, False, True])
    assert len(made.make(samples, Metrics())) == 2, "others may read it"


@pytest.mark.parametrize(("tokens", "most_rows"), [(None, 5), (1, 1)])
def test_the_sizes_that_a_run_has_resolved_bound_its_forwards(samples, tokens, most_rows):
    rows = []

    def actor(inputs, *args, **kwargs):
        rows.append(len(inputs))
        return MODELS["actor"](inputs, *args, **kwargs)

    one = maker({"actor": actor}, micro_rollout_batch_size=5, old_log_probs="recompute")
    resolved = Resolved(micro_train_tokens=None, micro_rollout_tokens=tokens, shares_prompts=False)
    one.hooks = Hooks(resolved=resolved)
    one.make(samples, Metrics())
    assert max(rows) <= most_rows
    assert sum(rows) == len(samples)
    assert (len(rows) == len(samples)) == (tokens == 1)
