"""The experience maker: what each model contributes, and that batching and ranks leave no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.config import PPOConfig
from openppo.experience import ExperienceMaker
from openppo.models import Actor, ScalarHeadModel
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
CONFIG = PPOConfig(
    init_kl_coef=KL_COEF, gamma=GAMMA, lambd=LAMBD, reward_clip_range=(-1.0, 1.5), micro_rollout_batch_size=2
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


def maker(config: PPOConfig = CONFIG, comm: Any = None, **models: Any) -> ExperienceMaker:
    chosen = {
        "actor": Actor(causal(1), temperature=0.7),
        "critic": ScalarHeadModel(scalar(2), "critic"),
        "reference": Actor(causal(3), temperature=0.7),
        **models,
    }
    return ExperienceMaker(
        **chosen, config=config, comm=comm or SingleProcess(), device=torch.device("cpu"), pad_token_id=END
    )


def with_micro_batch(size: int) -> PPOConfig:
    return dataclasses.replace(CONFIG, micro_rollout_batch_size=size)


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
    return {"k1": x, "k2": x * x / 2, "k3": torch.tensor(-x).double().exp().item() - 1 + x}[estimator]


def expected_fields(row: Trajectory, estimator: str) -> dict[str, list[float]]:
    """Everything the maker adds, one token after the other, in float64."""
    log_probs, reference = plain_log_probs(causal(1), row), plain_log_probs(causal(3), row)
    values, n = plain_values(scalar(2), row), len(row.token_ids)
    actions = [t for t in range(n) if row.action_mask[t]]
    score = max(-1.0, min(1.5, row.scores["score"]))
    rewards, advantages, returns = [0.0] * n, [0.0] * n, [0.0] * n
    for t in actions:
        rewards[t] = -KL_COEF * kl_by_hand(log_probs[t] - reference[t], estimator) + score * (t == actions[-1])
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
    made = maker(dataclasses.replace(CONFIG, kl_estimator=estimator)).make(trajectories, Metrics())
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
    expected = maker(with_micro_batch(2)).make(trajectories, expected_metrics)
    made = maker(with_micro_batch(size)).make(trajectories, metrics)
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
