"""The experience maker: what each model contributes, and that batching and ranks leave no trace."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.experience import ExperienceMaker
from openppo.models import Actor, ScalarHeadModel
from openppo.rollout.rollout import Rollout
from openppo.tracking import Metrics
from openppo.types import Experience, FinishReason, SingleProcess, Trajectory

Make = Callable[..., Trajectory]
OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
END = 2
TIGHT = 1e-6
KL_COEF, GAMMA, LAMBD = 0.2, 0.9, 0.8
CONFIG = from_options(
    TrainPPOConfig,
    pretrain="m",
    prompt_data="d",
    reward_fn="f.py",
    init_kl_coef=KL_COEF,
    gamma=GAMMA,
    lambd=LAMBD,
    reward_clip_range=(-1.0, 1.5),
    micro_rollout_batch_size=2,
    generate_max_len=8,
    old_log_probs="recompute",
)


def causal(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()


def scalar(seed: int) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(LlamaConfig(num_labels=1, pad_token_id=None, **SIZES)).double().eval()


@pytest.fixture
def trajectories(trajectory: Make) -> list[Trajectory]:
    """Of different lengths, not in order of length; with holes, cut by length, ended at once."""
    return [
        trajectory([5, END], [6, 7, END], score=0.75),
        trajectory([8, 9, 10], [11, 12, 13, 14, 15, END], [1, 0, 0, 1, 1, 0], FinishReason.LENGTH, score=3.0),
        trajectory([4], [END], score=-2.0),
        trajectory([4, 5, 6, 7], [8, 9], reason=FinishReason.LENGTH, score=0.5),
        trajectory([END, 3], [END], score=1.0),
    ]


def maker(config: TrainPPOConfig = CONFIG, comm: Any = None, **models: Any) -> ExperienceMaker:
    chosen = {
        "actor": Actor(causal(1), temperature=0.7),
        "critic": ScalarHeadModel(scalar(2), "critic"),
        "reference": Actor(causal(3), temperature=0.7),
        **models,
    }
    return ExperienceMaker(
        **chosen, config=config, comm=comm or SingleProcess(), device=torch.device("cpu"), pad_token_id=END
    )


def changed(**options: Any) -> TrainPPOConfig:
    return from_options(TrainPPOConfig, **(flat_dict(CONFIG) | options))


def plain_log_probs(model: LlamaForCausalLM, row: Trajectory) -> list[float]:
    """Of every token but the first, at the sampling temperature; 0 where no action is."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0] / 0.7
    distributions = torch.log_softmax(logits, -1)
    places = range(1, len(row.token_ids))
    return [0.0] + [distributions[t - 1, row.token_ids[t]].item() if row.action_mask[t] else 0.0 for t in places]


def plain_values(model: LlamaForSequenceClassification, row: Trajectory) -> list[float]:
    with torch.no_grad():
        outputs = model.score(model.base_model(input_ids=torch.tensor([row.token_ids])).last_hidden_state)[0, :, 0]
    return [outputs[t - 1].item() if row.action_mask[t] else 0.0 for t in range(len(row.token_ids))]


def kl_by_hand(x: float, estimator: str) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]


def expected_fields(row: Trajectory, estimator: str) -> dict[str, list[float]]:
    """Everything the maker adds, one token after the other, in float64."""
    log_probs, reference = plain_log_probs(causal(1), row), plain_log_probs(causal(3), row)
    values, n = plain_values(scalar(2), row), len(row.token_ids)
    actions = [t for t in range(n) if row.action_mask[t]]
    score = max(-1.0, min(1.5, row.scores["score"]))
    rewards, advantages, returns = [0.0] * n, [0.0] * n, [0.0] * n
    for t in actions:
        kl = kl_by_hand(log_probs[t] - reference[t], estimator)
        rewards[t] = -KL_COEF * (min(kl, 10.0) if estimator == "k3" else kl) + score * (t == actions[-1])
    next_value = next_advantage = 0.0
    for t in reversed(actions):
        next_advantage = rewards[t] + GAMMA * next_value - values[t] + GAMMA * LAMBD * next_advantage
        advantages[t], returns[t], next_value = next_advantage, next_advantage + values[t], values[t]
    named = {"log_probs": log_probs, "ref_log_probs": reference, "values": values}
    return {**named, "rewards": rewards, "advantages": advantages, "returns": returns}


def assert_same(found: Experience, expected: Experience) -> None:
    assert found.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=TIGHT, msg=name)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_every_field_equals_a_loop_over_tokens(trajectories: list[Trajectory], estimator: str) -> None:
    made = maker(changed(kl_estimator=estimator)).make(trajectories, Metrics())
    for row, experience in zip(trajectories, made, strict=True):
        for name, expected in expected_fields(row, estimator).items():
            assert experience.tensors()[name][0].tolist() == pytest.approx(expected, abs=2 * TIGHT), name


def test_experiences_come_in_the_order_of_the_trajectories(trajectories: list[Trajectory]) -> None:
    for row, experience in zip(trajectories, maker().make(trajectories, Metrics()), strict=True):
        assert experience.sequences.tolist() == [row.token_ids]
        assert experience.action_mask.tolist() == [row.action_mask]
        assert experience.rollout_log_probs[0].tolist() == row.log_probs
        assert experience.scores.tolist() == [row.scores["score"]]
        assert experience.truncated.tolist() == [row.finish_reason is FinishReason.LENGTH]


def test_entropy_is_that_of_the_actor_at_the_sampling_temperature(trajectories: list[Trajectory]) -> None:
    row = trajectories[0]
    entropy = maker().make([row], Metrics())[0].entropy[0]
    with torch.no_grad():
        logits = causal(1)(input_ids=torch.tensor([row.token_ids])).logits[0] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy().tolist()
    assert entropy.tolist() == pytest.approx([0.0, 0.0, *expected[1:-1]], abs=TIGHT)


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_the_size_of_a_forward_pass_does_not_matter(trajectories: list[Trajectory], size: int) -> None:
    expected_metrics, metrics = Metrics(), Metrics()
    expected = maker(changed(micro_rollout_batch_size=2)).make(trajectories, expected_metrics)
    made = maker(changed(micro_rollout_batch_size=size)).make(trajectories, metrics)
    for found, wanted in zip(made, expected, strict=True):
        assert_same(found, wanted)
    assert metrics.reduced(SingleProcess()) == pytest.approx(expected_metrics.reduced(SingleProcess()), abs=TIGHT)


def test_without_a_reference_there_is_no_kl(trajectories: list[Trajectory]) -> None:
    metrics = Metrics()
    made = maker(reference=None).make(trajectories, metrics)
    for row, experience in zip(trajectories, made, strict=True):
        assert experience.ref_log_probs is None
        last = max(t for t, is_action in enumerate(row.action_mask) if is_action)
        expected = [max(-1.0, min(1.5, row.scores["score"])) if t == last else 0.0 for t in range(len(row.token_ids))]
        assert experience.rewards[0].tolist() == expected
    assert not {"kl", "kl_k3", "kl_per_response"} & set(metrics.reduced(SingleProcess()))


def test_a_reference_equal_to_the_actor_has_kl_zero(trajectories: list[Trajectory]) -> None:
    metrics = Metrics()
    made = maker(reference=Actor(causal(1), temperature=0.7)).make(trajectories, metrics)
    assert all(torch.equal(e.log_probs, e.ref_log_probs) for e in made)
    assert metrics.reduced(SingleProcess())["kl"] == 0.0


def test_metrics_are_means_over_tokens_or_over_responses(trajectories: list[Trajectory]) -> None:
    metrics = Metrics()
    maker().make(trajectories, metrics)
    found = metrics.reduced(SingleProcess())
    fields = [expected_fields(row, "k1") for row in trajectories]
    kls = [
        [f["log_probs"][t] - f["ref_log_probs"][t] for t, is_action in enumerate(row.action_mask) if is_action]
        for row, f in zip(trajectories, fields, strict=True)
    ]
    n_tokens = sum(map(len, kls))
    assert found["kl"] == pytest.approx(sum(map(sum, kls)) / n_tokens, abs=TIGHT)
    assert found["kl_per_response"] == pytest.approx(sum(map(sum, kls)) / 5, abs=TIGHT)
    assert found["kl_k3"] == pytest.approx(sum(kl_by_hand(x, "k3") for k in kls for x in k) / n_tokens, abs=TIGHT)
    assert found["reward"] == pytest.approx((0.75 + 3.0 - 2.0 + 0.5 + 1.0) / 5)
    assert found["response_length"] == n_tokens / 5
    assert found["truncated_fraction"] == pytest.approx(2 / 5)
    gaps = [abs(f["log_probs"][t] - row.log_probs[t]) for row, f in zip(trajectories, fields, strict=True)
            for t in range(len(row.token_ids)) if row.action_mask[t]]  # fmt: skip
    assert found["rollout_log_prob_gap"] == pytest.approx(sum(gaps) / n_tokens, abs=TIGHT)


def test_nothing_is_differentiated(trajectories: list[Trajectory]) -> None:
    for experience in maker().make(trajectories, Metrics()):
        assert not any(tensor.requires_grad for tensor in experience.tensors().values())


@pytest.mark.parametrize("split", [0, 1, 4])
def test_ranks_run_equally_many_forwards_and_make_what_one_rank_would(
    trajectories: list[Trajectory], split: int, on_ranks: OnRanks
) -> None:
    def work(comm: Any) -> tuple[list[Experience], list[int]]:
        calls = [0, 0, 0]

        def counted(place: int, model: torch.nn.Module) -> Callable[..., Tensor]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[place] += 1
                return model(*args, **kwargs)

            return call

        models = {
            "actor": counted(0, Actor(actor, temperature=0.7)),
            "critic": counted(1, ScalarHeadModel(critic, "critic")),
            "reference": counted(2, Actor(reference, temperature=0.7)),
        }
        mine = trajectories[:split] if comm.rank == 0 else trajectories[split:]
        return maker(comm=comm, **models).make(mine, Metrics()), calls

    actor, critic, reference = causal(1), scalar(2), causal(3)  # before the threads: seeds are global
    (first, calls), (second, calls_of_second) = on_ranks(2, work)
    assert calls == calls_of_second
    assert len(set(calls)) == 1
    assert (len(first), len(second)) == (split, 5 - split)
    for found, expected in zip(first + second, maker().make(trajectories, Metrics()), strict=True):
        assert_same(found, expected)


GROUPED = {"advantage_estimator": "rloo", "n_samples_per_prompt": 2, "reward_clip_range": (-10.0, 10.0), "gamma": 1.0}


def in_groups(rows: list[Trajectory], groups: list[int]) -> list[Trajectory]:
    for row, group in zip(rows, groups, strict=True):
        row.group = group
    return rows


def critic_free(comm: Any = None, **options: Any) -> ExperienceMaker:
    return maker(changed(**(GROUPED | options)), comm=comm, critic=None)


def rewards_without_kl(made: list[Experience], row: Trajectory, i: int, kl_coef: float = KL_COEF) -> list[float]:
    found = made[i]
    kl = found.log_probs - found.ref_log_probs
    return (found.rewards + kl_coef * kl)[0][torch.tensor(row.action_mask)].tolist()


def test_without_a_critic_the_advantage_is_the_reward_to_go_of_score_less_baseline(
    trajectories: list[Trajectory],
) -> None:
    rows = in_groups(trajectories, [7, 3, 7, 3, 7])  # 7: 0.75, -2, 1; 3: 3, 0.5
    made = critic_free().make(rows, Metrics())
    centred = [0.75 - (-2.0 + 1.0) / 2, 3.0 - 0.5, -2.0 - (0.75 + 1.0) / 2, 0.5 - 3.0, 1.0 - (0.75 - 2.0) / 2]
    for i, (row, experience, last) in enumerate(zip(rows, made, centred, strict=True)):
        n = sum(row.action_mask)
        assert rewards_without_kl(made, row, i) == pytest.approx([0.0] * (n - 1) + [last], abs=1e-5)
        to_go = experience.rewards.flip(-1).cumsum(-1).flip(-1)
        expected = torch.where(experience.action_mask, to_go, 0.0)
        torch.testing.assert_close(experience.advantages, expected, rtol=0, atol=1e-5)
        assert torch.equal(experience.returns, experience.advantages)
        assert experience.values is None


def test_the_kl_penalty_is_neither_centred_nor_divided(trajectories: list[Trajectory]) -> None:
    rows = in_groups(trajectories, [0, 1, 0, 1, 0])
    made = critic_free(advantage_estimator="group_norm").make(rows, Metrics())
    scores = torch.tensor([3.0, 0.5])
    expected = ((scores - scores.mean()) / (scores.std() + 1e-9)).tolist()
    for i, score in zip((1, 3), expected, strict=True):
        assert rewards_without_kl(made, rows[i], i)[-1] == pytest.approx(score, abs=1e-5)


def test_with_a_kl_loss_the_rewards_hold_no_kl(trajectories: list[Trajectory]) -> None:
    made = maker(changed(use_kl_loss=True, kl_estimator="k3")).make(trajectories, Metrics())
    assert rewards_without_kl(made, trajectories[0], 0, kl_coef=0.0) == [0.0, 0.0, 0.75]
    assert made[0].ref_log_probs is not None


def test_an_unlikely_token_cannot_blow_up_the_rewards(trajectory: Make) -> None:
    row, metrics = trajectory([5], [6, END], score=1.0), Metrics()
    row.log_probs = [0.0, -14.0, -1.0]
    options = {"kl_estimator": "k3", "reward_clip_range": (-10.0, 10.0), "old_log_probs": "rollout"}
    made = maker(changed(**options), reference=lambda *_: torch.tensor([[0.0, -0.1, -1.0]])).make([row], metrics)
    assert made[0].rewards[0].tolist() == pytest.approx([0.0, -10 * KL_COEF, 1.0])
    assert metrics.reduced(SingleProcess())["kl_k3"] > 5e5  # the metric is the plain estimate


def test_named_scores_are_weighted_and_logged_one_by_one(trajectory: Make) -> None:
    rows = [trajectory([5], [6, END], right=1.0, brief=4.0), trajectory([5], [7, END], right=0.0, brief=2.0)]
    metrics = Metrics()
    made = maker(changed(reward_weights=("brief=-0.25",))).make(rows, metrics)
    assert [rewards_without_kl(made, row, i)[-1] for i, row in enumerate(rows)] == pytest.approx([0.0, -0.5], abs=1e-6)
    found = metrics.reduced(SingleProcess())
    assert found["reward"] == pytest.approx((0.0 - 0.5) / 2)
    assert (found["reward/right"], found["reward/brief"]) == (0.5, 3.0)


def test_rewards_of_single_tokens_join_the_score_at_the_last_action(trajectory: Make) -> None:
    rows = [trajectory([5], [6, 7, END], score=1.0), trajectory([5], [8, END], score=0.0)]
    rows[0].token_rewards = [0.0, 0.5, 0.25, 0.0]
    made = critic_free(advantage_estimator="reinforce_baseline").make(rows, Metrics())
    mean = (1.75 + 0.0) / 2
    assert rewards_without_kl(made, rows[0], 0) == pytest.approx([0.0, 0.0, 1.75 - mean], abs=1e-5)
    assert rewards_without_kl(made, rows[1], 1) == pytest.approx([0.0, 0.0 - mean], abs=1e-5)


def test_the_baseline_of_remax_is_the_shaped_score_of_the_greedy_response(trajectory: Make) -> None:
    rows = [trajectory([5], [6, END], score=3.0), trajectory([5], [7, END], score=-1.0)]
    greedy = trajectory([5], [8, 9], reason=FinishReason.LENGTH, score=2.0)
    for row in rows:
        row.greedy = greedy
    made = critic_free(advantage_estimator="remax", missing_eos_penalty=0.5).make(rows, Metrics())
    assert rewards_without_kl(made, rows[0], 0)[-1] == pytest.approx(3.0 - 1.5, abs=1e-6)
    assert rewards_without_kl(made, rows[1], 1)[-1] == pytest.approx(-1.0 - 1.5, abs=1e-6)


def test_responses_that_were_cut_off_are_penalized_and_left_out_of_the_losses(trajectories: list[Trajectory]) -> None:
    metrics = Metrics()
    options = {"overlong_filter": True, "missing_eos_penalty": 0.25, "reward_clip_range": (-9.0, 9.0)}
    made = maker(changed(**options)).make(trajectories, metrics)
    for row, experience in zip(trajectories, made, strict=True):
        truncated = row.finish_reason is FinishReason.LENGTH
        assert experience.action_mask.tolist() == [[False] * len(row.token_ids) if truncated else row.action_mask]
    last = max(t for t, is_action in enumerate(trajectories[1].action_mask) if is_action)
    assert metrics.reduced(SingleProcess())["shaped_reward"] == pytest.approx((0.75 + 3.0 - 2.0 + 0.5 + 1.0 - 0.5) / 5)
    kl = (made[1].log_probs - made[1].ref_log_probs)[0, last].item()
    assert made[1].rewards[0, last].item() == pytest.approx(3.0 - 0.25 - KL_COEF * kl, abs=1e-6)
    assert metrics.reduced(SingleProcess())["response_length"] == sum(sum(t.action_mask) for t in trajectories) / 5


def test_running_normalization_uses_the_scores_of_all_ranks_and_steps(
    trajectories: list[Trajectory], on_ranks: OnRanks
) -> None:
    options = {"normalize_reward": True, "reward_normalizer": "running", "reward_clip_range": (-9.0, 9.0)}

    def work(comm: Any) -> list[float]:
        mine = trajectories[:2] if comm.rank == 0 else trajectories[2:]
        ours = maker(changed(**options), comm=comm, **models)
        ours.make(mine, Metrics())
        made = ours.make(mine, Metrics())
        return [rewards_without_kl(made, row, i)[-1] for i, row in enumerate(mine)]

    models = {"actor": Actor(causal(1), temperature=0.7), "critic": ScalarHeadModel(scalar(2), "critic"),
              "reference": Actor(causal(3), temperature=0.7)}  # fmt: skip
    scores = torch.tensor([row.scores["score"] for row in trajectories])
    expected = ((scores - scores.mean()) / scores.std(correction=0)).tolist()
    first, second = on_ranks(2, work)
    assert first + second == pytest.approx(expected, abs=1e-5)


def test_monte_carlo_returns_do_not_depend_on_values(trajectories: list[Trajectory]) -> None:
    """While only the critic learns its values."""
    made = maker(changed(gamma=1.0, value_pretrain_steps=1)).make(trajectories, Metrics(), n_done=0)
    for experience in made:
        to_go = torch.where(experience.action_mask, experience.rewards.flip(-1).cumsum(-1).flip(-1), 0.0)
        torch.testing.assert_close(experience.returns, to_go, rtol=0, atol=1e-5)
    after = maker(changed(gamma=1.0, value_pretrain_steps=1)).make(trajectories, Metrics(), n_done=1)
    assert not torch.equal(after[0].returns, made[0].returns)


def test_the_engines_log_probs_stand_for_the_actors_where_asked(trajectories: list[Trajectory]) -> None:
    """No forward of the actor: KL, advantages and an estimate of the entropy follow from the engine's log-probs."""
    calls: list[int] = []
    metrics, config = Metrics(), changed(old_log_probs="rollout")
    made = maker(config, actor=lambda *_, **__: calls.append(1)).make(trajectories, metrics)
    assert not calls
    for row, experience in zip(trajectories, made, strict=True):
        masked = [p if action else 0.0 for p, action in zip(row.log_probs, row.action_mask, strict=True)]
        assert experience.log_probs[0].tolist() == pytest.approx(masked)
        assert experience.entropy is None
    recomputed = maker().make(trajectories, Metrics())
    assert all(torch.equal(a.values, b.values) for a, b in zip(made, recomputed, strict=True))
    found = metrics.reduced(SingleProcess())
    sampled = [p for row in trajectories for p, action in zip(row.log_probs, row.action_mask, strict=True) if action]
    assert found["entropy"] == pytest.approx(-sum(sampled) / len(sampled))
    assert not [name for name in found if name.startswith("rollout_")], "no mismatch is claimed"


@pytest.mark.parametrize(
    ("n_samples", "options", "source"),
    [
        (4, {}, "rollout"),
        (4, {"top_p": 0.9}, "recompute"),
        (4, {"min_new_tokens": 1}, "recompute"),
        (4, {"stop": ("x",)}, "rollout"),
        (4, {"old_log_probs": "recompute"}, "recompute"),
        (4, {"bf16": True}, "training"),
        (5, {"bf16": True}, "recompute"),  # several optimizer steps
        (3, {"bf16": True}, "training"),
        (4, {"bf16": True, "freezing_actor_steps": 1}, "recompute"),  # the actor is not trained
        (4, {"bf16": True, "rollout_batch_size": 8}, "recompute"),  # other steps of the run are larger
        (4, {"bf16": True, "lora_rank": 2, "lora_dropout": 0.1}, "recompute"),
    ],
)
def test_where_old_log_probs_come_from(n_samples: int, options: dict[str, Any], source: str, trajectory: Make) -> None:
    calls: list[int] = []

    def actor(ids: Tensor, mask: Tensor, actions: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return actions * -2.0, actions * 1.0

    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "old_log_probs": "auto"}
    rows = [trajectory([5], [6, END], score=1.0) for _ in range(n_samples)]
    one = maker(changed(**sizes | options), actor=actor, reference=None, critic=lambda ids, mask: mask * 1.0)
    made = one.make(Rollout(rows, Metrics()), Metrics())
    assert bool(calls) == (source == "recompute")
    log_probs = {"rollout": [0.0, -0.625, -0.75], "recompute": [0.0, -2.0, -2.0], "training": None}[source]
    assert [e.log_probs if e.log_probs is None else e.log_probs[0].tolist() for e in made] == [log_probs] * n_samples
    of_others = one.make(rows, Metrics())
    assert [e.log_probs[0].tolist() for e in of_others] == [[0.0, -2.0, -2.0]] * n_samples, "recomputed"
    if source == "training":
        stale = one.make(Rollout(rows, Metrics()), Metrics(), version=1)
        assert [e.log_probs[0].tolist() for e in stale] == [[0.0, -2.0, -2.0]] * n_samples, "recomputed"


def test_scores_under_way_are_awaited_after_the_models_have_run(trajectory: Make) -> None:
    events: list[str] = []
    row = trajectory([5], [6, END])

    def actor(ids: Tensor, mask: Tensor, actions: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        events.append("actor")
        return actions * -2.0, actions * 1.0

    def write() -> None:
        events.append("scores")
        row.scores["score"] = 1.0
        measured.add("reward_errors", 3, reduce="sum")

    measured, metrics = Metrics(), Metrics()
    made = maker(actor=actor, reference=None, critic=lambda ids, mask: mask * 1.0).make(
        Rollout([row], measured, write), metrics
    )
    assert events == ["actor", "scores"]
    assert made[0].scores.tolist() == [1.0]
    assert metrics.reduced(SingleProcess())["reward_errors"] == 3, (
        "what the source has measured is in the step's metrics"
    )
