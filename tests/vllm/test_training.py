"""PPO with vLLM as rollout engine. Stale weights in it would show as log-probs that differ from the actor's."""

import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from openppo.models import Actor

SCRIPT = Path(__file__).with_name("run_training.py")
N_TOKENS = 8


@pytest.fixture(scope="module")
def train(inputs, tmp_path_factory, launch):
    """``train(ranks, options)`` runs two steps in an episode, and returns the folder of the model."""

    def run(ranks, options, folder=None, pretrain=inputs / "llama"):
        folder = folder or tmp_path_factory.mktemp("run") / "model"
        arguments = f"""--rollout_engine vllm --pretrain {pretrain} --prompt_data {inputs}/prompts.jsonl
            --reward_fn {inputs}/reward.py --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 2
            --generate_max_len {N_TOKENS} --prompt_max_len 16 --actor_learning_rate 1e-2 --lr_scheduler constant
            --lr_warmup_ratio 0 --init_kl_coef 0 --advantage_estimator reinforce --save_path {folder} {options}"""
        output = launch(ranks, *((SCRIPT,) if ranks else ("-m", "openppo.cli.train_ppo")), *arguments.split())
        assert "Traceback" not in output
        return folder

    return run


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_samples_are_the_actors(folder):
    """Of both steps, and that a step changes log-probs by more than the bound."""
    logged = lines(folder / "logs" / "metrics.jsonl")
    assert len(logged) == 2
    for metrics in logged:
        assert metrics["rollout_log_prob_gap_max"] < 1e-4
        assert abs(metrics["rollout_kl_k1"]) < 1e-4
        assert metrics["rollout_kl"] < 1e-6
        assert metrics["actor_grad_norm"] > 0


@torch.no_grad()
def greedy_answer(model, tokenizer, prompt):
    ids, new = tokenizer(prompt)["input_ids"], []
    while len(new) < N_TOKENS and tokenizer.eos_token_id not in new:
        new.append(int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return tokenizer.decode(new)


@pytest.mark.parametrize(
    ("ranks", "options", "saved"),
    [
        (0, "--eval_steps 1 --enable_ema --ema_beta 0.5", AutoModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 2", AutoModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 3", AutoModelForCausalLM),
        (0, "--eval_steps 2 --zero_stage 2 --lora_rank 4", AutoPeftModelForCausalLM),
        (2, "--eval_steps 2 --zero_stage 3 --lora_rank 4", AutoPeftModelForCausalLM),
    ],
)
def test_samples_are_the_actors_and_the_last_evaluation_is_of_what_is_saved(inputs, train, ranks, options, saved):
    folder = train(ranks, f"--eval_data {inputs}/prompts.jsonl {options}")
    assert_samples_are_the_actors(folder)
    model, tokenizer = saved.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    evaluated = [line for line in lines(folder / "logs" / "samples.jsonl") if line.get("evaluation")][-4:]
    assert len(evaluated) == 4
    for sample in evaluated:
        assert sample["response"] == greedy_answer(model, tokenizer, sample["prompt"])


def test_a_peft_folder_is_a_start_like_any_other(inputs, train, tmp_path):
    adapted = Actor(str(inputs / "llama"), lora_rank=4, lora_alpha=8).model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")
    assert_samples_are_the_actors(train(0, "", pretrain=tmp_path / "adapters"))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(train):
    whole, folder = train(0, "--num_episodes 2"), train(0, "--num_episodes 1")
    train(0, "--num_episodes 2 --load_checkpoint", folder)
    logged, expected = (lines(f / "logs" / "metrics.jsonl") for f in (folder, whole))
    assert [metrics["step"] for metrics in logged] == [1, 2, 3, 4]
    for found, other in zip(logged, expected, strict=True):
        for name in ("reward", "response_length", "entropy", "actor_grad_norm"):
            assert found[name] == pytest.approx(other[name], rel=1e-4)
