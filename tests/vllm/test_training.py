"""PPO with vLLM as rollout engine. Stale weights in it would show as log-probs that differ from the actor's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from openppo.models import Actor

SCRIPT = Path(__file__).with_name("run_training.py")
N_TOKENS = 8


@pytest.fixture(scope="module")
def train(inputs: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> Callable[..., Path]:
    """``train(ranks, options)`` runs two steps in an episode, and returns the folder of the model."""

    def run(ranks: int, options: str, folder: Path | None = None, pretrain: Path = inputs / "llama") -> Path:
        folder = folder or tmp_path_factory.mktemp("run") / "model"
        arguments = f"""--rollout_engine vllm --pretrain {pretrain} --prompt_data {inputs}/prompts.jsonl
            --reward_fn {inputs}/reward.py --rollout_batch_size 8 --train_batch_size 8 --micro_train_batch_size 2
            --generate_max_len {N_TOKENS} --prompt_max_len 16 --actor_learning_rate 1e-2 --lr_scheduler constant
            --lr_warmup_ratio 0 --init_kl_coef 0 --advantage_estimator reinforce --save_path {folder} {options}"""
        output = launch(ranks, *((SCRIPT,) if ranks else ("-m", "openppo.cli.train_ppo")), *arguments.split())
        assert "Traceback" not in output
        return folder

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_samples_are_the_actors(folder: Path) -> None:
    """Of both steps, and that a step changes log-probs by more than the bound."""
    logged = lines(folder / "logs" / "metrics.jsonl")
    assert len(logged) == 2
    for metrics in logged:
        assert metrics["rollout_log_prob_gap_max"] < 1e-4
        assert abs(metrics["rollout_kl_k1"]) < 1e-4
        assert metrics["rollout_kl"] < 1e-6
        assert metrics["actor_grad_norm"] > 0


@torch.no_grad()
def greedy_answer(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt)["input_ids"]
    new: list[int] = []
    while len(new) < N_TOKENS and tokenizer.eos_token_id not in new:
        new.append(int(model(torch.tensor([[*ids, *new]])).logits[0, -1].argmax()))
    return str(tokenizer.decode(new))


def assert_evaluation_is_of_the_saved_model(folder: Path, model: Any) -> None:
    """The last evaluation is of the weights that are saved."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    evaluated = [line for line in lines(folder / "logs" / "samples.jsonl") if line.get("evaluation")][-4:]
    assert len(evaluated) == 4
    for sample in evaluated:
        assert sample["response"] == greedy_answer(model, tokenizer, sample["prompt"])


def test_one_process_with_an_evaluated_average(inputs: Path, train: Callable[..., Path]) -> None:
    folder = train(0, f"--eval_data {inputs}/prompts.jsonl --eval_steps 1 --enable_ema --ema_beta 0.5")
    assert_samples_are_the_actors(folder)
    assert_evaluation_is_of_the_saved_model(folder, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_with_whole_weights(inputs: Path, train: Callable[..., Path], stage: int) -> None:
    folder = train(2, f"--zero_stage {stage} --eval_data {inputs}/prompts.jsonl --eval_steps 2")
    assert_samples_are_the_actors(folder)
    assert_evaluation_is_of_the_saved_model(folder, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(("ranks", "stage"), [(0, 2), (2, 3)])
def test_adapters(inputs: Path, train: Callable[..., Path], ranks: int, stage: int) -> None:
    folder = train(ranks, f"--zero_stage {stage} --lora_rank 4 --eval_data {inputs}/prompts.jsonl --eval_steps 2")
    assert_samples_are_the_actors(folder)
    assert_evaluation_is_of_the_saved_model(folder, AutoPeftModelForCausalLM.from_pretrained(folder))


def test_a_peft_folder_is_a_start_like_any_other(inputs: Path, train: Callable[..., Path], tmp_path: Path) -> None:
    adapted: Any = Actor(str(inputs / "llama"), lora_rank=4, lora_alpha=8).model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapters")
    assert_samples_are_the_actors(train(0, "", pretrain=tmp_path / "adapters"))


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(train: Callable[..., Path]) -> None:
    whole, folder = train(0, "--num_episodes 2"), train(0, "--num_episodes 1")
    train(0, "--num_episodes 2 --load_checkpoint", folder)
    logged, expected = (lines(f / "logs" / "metrics.jsonl") for f in (folder, whole))
    assert [metrics["step"] for metrics in logged] == [1, 2, 3, 4]
    for found, other in zip(logged, expected, strict=True):
        for name in ("reward", "response_length", "entropy", "actor_grad_norm"):
            assert found[name] == pytest.approx(other[name], rel=1e-4)
