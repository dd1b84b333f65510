"""Whole runs of train_ppo on two ranks with LoRA, dynamic sampling, several rewards and evaluation."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SCRIPT = Path(__file__).with_name("run_steps.py")
REWARD = """
def reward_fn(prompts, responses, labels):
    # half of the prompts earn the same whatever the response is
    return {
        "even": [float(label % 2 or len(response) % 2) for response, label in zip(responses, labels)],
        "long": [len(response) / 8 for response in responses],
    }
"""
Run = dict[str, Any]


def write_small_critic(tiny: Path, folder: Path) -> None:
    """A causal model with the actor's tokens, half as wide and of one layer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "actor")
    config = AutoConfig.from_pretrained(tiny / "actor")
    config.hidden_size, config.num_hidden_layers, config.head_dim = 16, 1, 4
    config.layer_types = None
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def runs(tiny: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Run]:
    """Each run's result, the lines of its metrics.jsonl (``logged``) and the folder of its models."""
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "reward.py").write_text(REWARD)
    common = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --label_key label --generate_max_len 8
        --lr_scheduler constant --lr_warmup_ratio 0 --actor_learning_rate 1e-2 --critic_learning_rate 1e-2
        --rollout_batch_size 6 --train_batch_size 6 --micro_train_batch_size 2"""
    lora = f"""{common} --reward_pretrain {tiny}/reward --lora_rank 4 --critic_lora_rank 2 --zero_stage 3
        --gradient_checkpointing --max_samples 12"""
    groups = f"""{common} --reward_fn {folder}/reward.py --reward_weights long=0 --advantage_estimator group_norm
        --n_samples_per_prompt 2 --zero_stage 2 --dynamic_sampling"""
    several = f"""{common} --reward_pretrain {tiny}/reward --reward_fn {folder}/reward.py --verifiable_reward length
        --verify_length 5 --reward_weights reward_model=0.5 even=2 --max_samples 6 --zero_stage 3
        --eval_data {tiny}/prompts.jsonl --eval_before_training --eval_n_samples_per_prompt 4 --eval_temperature 1
        --num_episodes 2 --pass_reward 2"""
    write_small_critic(tiny, folder / "small")
    frozen = f"{common} --reward_fn {folder}/reward.py --critic_pretrain {folder}/small --max_samples 12"
    arguments = {
        "lora": lora,
        "frozen": f"{frozen} --freezing_actor_steps 2 --num_episodes 1",
        "thawed": f"{frozen} --value_pretrain_steps 1 --num_episodes 1",
        "dynamic": f"{groups} --dynamic_sampling_max_batches 2",
        "one batch": f"{groups} --dynamic_sampling_max_batches 1",
        "several": several,
    }
    cases = [{"name": name, "command": "train_ppo", "arguments": text.split()} for name, text in arguments.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    launch(2, SCRIPT, folder / "cases.json", folder)

    def read(name: str) -> Run:
        logged = (folder / name / "model" / "logs" / "metrics.jsonl").read_text().splitlines()
        result = json.loads((folder / name / "result.json").read_text())
        return {"folder": folder / name, "logged": [json.loads(line) for line in logged], **result}

    return {name: read(name) for name in arguments}


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


def test_lora_under_zero_3_saves_adapters_that_plain_peft_loads(runs: dict[str, Run], tiny: Path) -> None:
    run = runs["lora"]
    actor = AutoPeftModelForCausalLM.from_pretrained(run["folder"] / "model")
    assert_actor_is(actor, run)
    with actor.disable_adapter(), pytest.raises(AssertionError):
        assert_actor_is(actor, run)  # training has moved it
    assert AutoTokenizer.from_pretrained(run["folder"] / "model").eos_token == "<eos>"
    critic = AutoPeftModelForSequenceClassification.from_pretrained(run["folder"] / "model_critic", num_labels=1)
    assert_critic_is(critic, run)
    for role, rank in (("model", 4), ("model_critic", 2)):
        tensors = load_file(run["folder"] / role / "adapter_model.safetensors")
        assert all(tensor.numel() > 0 for tensor in tensors.values())
        assert {min(t.shape) for name, t in tensors.items() if "lora" in name} == {rank}
    assert any("score" in name for name in tensors)


def test_the_reference_of_lora_is_no_model_of_its_own_and_starts_equal(runs: dict[str, Run]) -> None:
    run = runs["lora"]
    assert set(run["shares"]) == {"actor", "critic", "reward"}
    assert all(share < 0.52 for share in run["shares"].values())
    first, second = run["logged"]
    assert first["kl"] == pytest.approx(0, abs=1e-6)  # the engine's log-probs against a forward's
    assert first["kl_k3"] == pytest.approx(0, abs=1e-9)
    assert second["kl_k3"] > 1e-4
    assert second["actor_grad_norm"] > 0


def test_merged_weights_are_those_of_plain_transformers(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["lora"]
    for role in ("model", "model_critic"):
        command = [sys.executable, "-m", "openppo.cli.merge_lora", "--save_path", str(tmp_path / role)]
        subprocess.run([*command, "--lora_path", str(run["folder"] / role)], check=True, timeout=200)
    assert_actor_is(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), run)
    assert_critic_is(AutoModelForSequenceClassification.from_pretrained(tmp_path / "model_critic"), run)


def moved(before: Path, after: Path) -> bool:
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return any(not torch.equal(old[name], new[name]) for name in old)


def test_only_the_critic_learns_in_the_first_steps(runs: dict[str, Run], tiny: Path) -> None:
    frozen, thawed = runs["frozen"], runs["thawed"]
    assert not moved(tiny / "actor", frozen["folder"] / "model")
    assert moved(tiny / "actor", thawed["folder"] / "model")
    assert all(line["value_loss"] > 0 and "policy_loss" not in line for line in frozen["logged"])
    assert ["policy_loss" in line for line in thawed["logged"]] == [False, True]
    assert thawed["logged"][1]["actor_learning_rate"] == pytest.approx(1e-2)


def test_the_critic_may_be_smaller_than_the_actor(runs: dict[str, Run]) -> None:
    run = runs["frozen"]
    critic = AutoModelForSequenceClassification.from_pretrained(run["folder"] / "model_critic")
    assert critic.config.hidden_size == 16
    assert_critic_is(critic, run)


def test_dynamic_sampling_trains_on_groups_with_different_rewards_only(runs: dict[str, Run]) -> None:
    one, two = runs["one batch"], runs["dynamic"]
    assert len(one["samples"]) == 4
    assert len(two["samples"]) == 2  # each step asked for a second batch of prompts
    assert two["samples"][0][: len(one["samples"][0])] != []
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


def test_several_rewards_are_logged_by_name_and_weighted(runs: dict[str, Run]) -> None:
    for line in runs["several"]["logged"][1:]:
        names = {name for name in line if name.startswith("reward/")}
        assert names == {"reward/even", "reward/long", "reward/length", "reward/reward_model"}
        total = 2 * line["reward/even"] + line["reward/long"] + line["reward/length"] + line["reward/reward_model"] / 2
        assert line["reward"] == pytest.approx(total, abs=1e-5)


def test_held_out_prompts_are_evaluated_before_training_and_after_each_episode(runs: dict[str, Run]) -> None:
    logged = runs["several"]["logged"]
    assert [line["step"] for line in logged] == [0, 1, 2]
    for line in logged:
        assert 0 <= line["eval_pass@1"] <= line["eval_pass@2"] <= line["eval_pass@4"] <= 1
        assert {"eval_reward", "eval_reward/even", "eval_response_length"} <= set(line)
    assert logged[0]["eval_reward"] != logged[2]["eval_reward"]
