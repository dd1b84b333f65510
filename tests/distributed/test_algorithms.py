"""Whole runs of train_ppo on two ranks: they end, and what they save is what they trained.

A hang shows as a collective that times out, or as a launch that does not end.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.distributed.runs import outcome, vector

REWARD = """
def reward_fn(prompts, responses, labels):
    # half of the prompts earn the same whatever the response is
    return {
        "even": [float(label % 2 or len(response) % 2) for response, label in zip(responses, labels)],
        "long": [len(response) / 8 for response in responses],
    }
"""
Run = dict[str, Any]


def write_models(tiny: Path, folder: Path) -> None:
    """Language models with the actor's tokens: a ``small`` one, half as wide and of one layer, an ``other`` one, and a
    ``bigram`` one that ends at once after "a" and says "b" without end after "b"."""
    tokenizer, config = (
        auto.from_pretrained(tiny / "actor") for auto in (AutoTokenizer, AutoConfig)
    )
    model = AutoModelForCausalLM.from_pretrained(tiny / "actor")
    a, b, eos = tokenizer.convert_tokens_to_ids(["a", "b", tokenizer.eos_token])
    with torch.no_grad():
        for layer in (
            model.model.layers
        ):  # the layers add nothing: what follows depends on the last token alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), model.config.hidden_size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[eos, a] = model.lm_head.weight[b, b] = 3.0
    torch.manual_seed(11)
    other, small = AutoModelForCausalLM.from_config(config), copy.deepcopy(config)
    small.hidden_size, small.num_hidden_layers, small.head_dim, small.layer_types = 16, 1, 4, None
    models = {"bigram": model, "other": other, "small": AutoModelForCausalLM.from_config(small)}
    for name, made in models.items():
        made.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


LONG = 40
UNEQUAL = f"""--reward_pretrain {{tiny}}/reward --pretrain {{folder}}/bigram --prompt_data {{folder}}/unequal.jsonl
    --num_episodes 3 --rollout_batch_size 2 --train_batch_size 2 --micro_train_batch_size 1 --generate_max_len {LONG}
    --zero_stage 3"""
PLAIN = """--reward_pretrain {tiny}/reward --pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl
    --pretrain_data {tiny}/documents.jsonl --actor_learning_rate 1e-3 --critic_learning_rate 1e-3 --generate_max_len 8
    --lr_warmup_ratio 0"""
COMMON = """--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --label_key label --generate_max_len 8
    --lr_scheduler constant --lr_warmup_ratio 0 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2
    --rollout_batch_size 6 --train_batch_size 6 --micro_train_batch_size 2"""
GROUPS = f"""{COMMON} --reward_fn {{folder}}/reward.py --reward_weights long=0 --advantage_estimator group_norm
    --n_samples_per_prompt 2 --zero_stage 2"""
FROZEN = (
    f"{COMMON} --reward_fn {{folder}}/reward.py --critic_pretrain {{folder}}/small --max_samples 12"
)
REFERENCE = """--pretrain {tiny}/actor --ref_pretrain {folder}/other --prompt_data {tiny}/prompts.jsonl
    --verifiable_reward length:3 --advantage_estimator reinforce --generate_max_len 6
    --rollout_batch_size 4 --train_batch_size 4 --micro_train_batch_size 2"""
CASES: dict[str, Any] = {
    "reference": {"arguments": f"{REFERENCE} --zero_stage 3", "n_rows": 4, "n_steps": 1},
    "reference of LoRA": {"arguments": f"{REFERENCE} --lora_rank 2", "n_rows": 4, "n_steps": 1},
    "unequal": UNEQUAL,
    "unequal in lockstep": {"arguments": UNEQUAL, "lockstep": True},
    "odd": f"{PLAIN} --max_samples 5 --rollout_batch_size 4 --train_batch_size 4 --num_episodes 2 --zero_stage 3",
    "lora": f"""{COMMON} --reward_pretrain {{tiny}}/reward --lora_rank 4 --critic_lora_rank 2 --zero_stage 3
        --gradient_checkpointing --max_samples 12""",
    "frozen": f"{FROZEN} --freezing_actor_steps 2 --num_episodes 1",
    "thawed": f"{FROZEN} --value_pretrain_steps 1 --num_episodes 1",
    "dynamic": f"{GROUPS} --dynamic_sampling 2",
    "one batch": f"{GROUPS} --dynamic_sampling 1",
    "several": f"""{COMMON} --reward_pretrain {{tiny}}/reward --reward_fn {{folder}}/reward.py
        --verifiable_reward length:5 --reward_weights reward_model=0.5 even=2 --max_samples 6
        --zero_stage 3 --num_episodes 2""",
}


@pytest.fixture(scope="module")
def runs(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, run_cases: Callable[..., str]
) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "reward.py").write_text(REWARD)
    write_models(tiny, folder)
    (folder / "unequal.jsonl").write_text('{"input": "cda"}\n{"input": "cdb"}\n')
    run_cases(2, folder, CASES)
    return {name: outcome(folder / name) for name in CASES}


def assert_actor_is(model: Any, run: Run) -> None:
    for ids, log_probs in zip(run["probe"]["ids"], run["probe"]["log_probs"], strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        plain = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        assert log_probs[1 : len(ids)] == pytest.approx(plain.tolist(), abs=1e-5)


def assert_critic_is(model: Any, run: Run) -> None:
    for ids, values in zip(run["probe"]["ids"], run["probe"]["values"], strict=True):
        if len(ids) > 1:
            score = model(input_ids=torch.tensor([ids[:-1]])).logits.item()
            assert values[len(ids) - 1] == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("name", ("unequal", "unequal in lockstep"))
def test_zero_3_ends_when_one_rank_samples_much_longer_than_the_other(runs, name):
    run = runs[name]
    assert len(run["logged"]) == len(run["samples"]) == 3
    for samples in run["samples"]:
        assert sorted(len(sample["response"]) for sample in samples) == [1, LONG]
        assert {sample["finish_reason"] for sample in samples} == {"stop", "length"}
    assert all(line["response_length"] == (1 + LONG) / 2 for line in run["logged"])
    assert all(line["truncated_fraction"] == 0.5 for line in run["logged"])


def test_an_odd_number_of_prompts_trains_all_of_them_and_plain_models_are_saved(runs):
    run = runs["odd"]
    assert [len(samples) for samples in run["samples"]] == [
        4,
        1,
        4,
        1,
    ]  # a rank has no prompt in every second step
    assert [line["step"] for line in run["logged"]] == [1, 2, 3, 4]
    for first, second in (run["samples"][:2], run["samples"][2:]):
        assert len({tuple(sample["prompt"]) for sample in first + second}) == 5
    model = AutoModelForCausalLM.from_pretrained(run["folder"] / "model")
    assert_actor_is(model, run)
    assert_critic_is(
        AutoModelForSequenceClassification.from_pretrained(run["folder"] / "model_critic"), run
    )
    tokenizer = AutoTokenizer.from_pretrained(run["folder"] / "model")
    ids = model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > 3


def test_the_reference_of_lora_is_no_model_of_its_own_and_starts_equal(runs):
    run = runs["lora"]
    assert set(run["shares"]) == {"actor", "critic", "reward"}
    assert all(share < 0.52 for share in run["shares"].values())
    first, second = run["logged"]
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the engine's log-probs against a forward's
    assert first["kl_k3"] == pytest.approx(0, abs=1e-9)
    assert second["kl_k3"] > 1e-4
    assert second["actor_grad_norm"] > 0


@pytest.mark.parametrize("name", ("reference", "reference of LoRA"))
@torch.no_grad()
def test_the_penalty_is_measured_from_the_given_reference(runs, tiny, name):
    run, gaps = runs[name], []
    models = [
        AutoModelForCausalLM.from_pretrained(path)
        for path in (tiny / "actor", run["folder"].parent / "other")
    ]
    for sample in run["samples"][0]:
        ids, n = torch.tensor(sample["prompt"] + sample["response"]), len(sample["prompt"])
        policy, other = (
            torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1) for model in models
        )
        gaps.append((policy - other).gather(-1, ids[1:, None])[n - 1 :, 0])
    expected = torch.cat(gaps).mean().item()
    assert abs(expected) > 0.01
    assert run["metrics"][0]["kl"] == pytest.approx(expected, abs=1e-4)


def test_only_the_critic_learns_in_the_first_steps(runs, tiny):
    frozen, thawed = runs["frozen"], runs["thawed"]
    assert torch.equal(vector(tiny / "actor"), vector(frozen["folder"] / "model"))
    assert not torch.equal(vector(tiny / "actor"), vector(thawed["folder"] / "model"))
    assert all(line["value_loss"] > 0 and "policy_loss" not in line for line in frozen["logged"])
    assert ["policy_loss" in line for line in thawed["logged"]] == [False, True]
    assert thawed["logged"][1]["actor_learning_rate"] == pytest.approx(1e-2)
    critic = AutoModelForSequenceClassification.from_pretrained(frozen["folder"] / "model_critic")
    assert critic.config.hidden_size == 16, "it may be smaller than the actor"
    assert_critic_is(critic, frozen)


def test_dynamic_sampling_trains_on_groups_with_different_rewards_only(runs):
    one, two = runs["one batch"], runs["dynamic"]
    assert len(one["samples"]) == 4
    assert len(two["samples"]) == 2  # each step asked for a second batch of prompts
    n_groups = [len({s["group"] for s in step}) for step in two["samples"]]
    assert all(0 < n <= 6 for n in n_groups)
    assert max(n_groups) > max(len({s["group"] for s in step}) for step in one["samples"])
    for step in one["samples"] + two["samples"]:
        by_group: dict[int, set[float]] = {}
        for sample in step:
            by_group.setdefault(sample["group"], set()).add(sample["scores"]["even"])
        assert all(len(rewards) == 2 for rewards in by_group.values())
    assert all("value_loss" not in line for line in two["logged"])
    assert [line["sampled_batches"] for line in two["logged"]] == [2, 2]
    assert [line["sampled_batches"] for line in one["logged"]] == [1] * 4
    for line, step in zip(one["logged"], one["samples"], strict=True):
        assert line["useful_groups"] == len({sample["group"] for sample in step})
        assert line["sampled_reward"] != line["reward"]


def test_several_rewards_are_weighted(runs):
    for line in runs["several"]["logged"]:
        names = {name for name in line if name.startswith("reward/")}
        assert names == {"reward/even", "reward/long", "reward/length", "reward/reward_model"}
        total = (
            2 * line["reward/even"]
            + line["reward/long"]
            + line["reward/length"]
            + line["reward/reward_model"] / 2
        )
        assert line["reward"] == pytest.approx(total, abs=1e-5)
