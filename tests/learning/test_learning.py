"""The trainers learn: from a random model of two layers, in seconds, through the commands that users run."""

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import save_tokenizer

LETTERS = "abcdefgh"
Train = Callable[[str, str], list[dict[str, Any]]]
REWARD = "def reward_fn(response):\n    return response.count('a') / max(len(response), 1)\n"
PPO = """--reward_fn reward.py --prompt_data prompts.jsonl --train_batch_size 32 --micro_train_batch_size 32
    --micro_rollout_batch_size 64 --generate_max_len 8 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3"""


def write_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word(rng: random.Random, least: int, most: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=rng.randint(least, most)))


@pytest.fixture
def random_llama(tmp_path: Path) -> Callable[[str], None]:
    """``random_llama(characters)``: a Llama of two layers whose tokens are these, in the folder ``model``."""

    def save(characters: str) -> None:
        tokenizer = save_tokenizer(tmp_path / "model", characters)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(tmp_path / "model")

    return save


@pytest.fixture
def train(run: Callable[..., str], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``train(command, arguments)`` trains the model in one process, into the folder ``out``; the logged metrics."""

    def logged(name: str, arguments: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", f"openppo.cli.{name}", "--pretrain", "model", "--save_path", "out"]
        run([*command, *arguments.split()], tmp_path)
        return [json.loads(line) for line in (tmp_path / "out" / "logs" / "metrics.jsonl").read_text().splitlines()]

    return logged


@pytest.fixture
def prompts(random_llama: Callable[[str], None], tmp_path: Path) -> None:
    """A policy, prompts and a reward for a letter."""
    random_llama(LETTERS)
    rng = random.Random(0)
    write_rows(tmp_path / "prompts.jsonl", [{"input": word(rng, 1, 6)} for _ in range(64)])
    (tmp_path / "reward.py").write_text(REWARD)


@pytest.mark.usefixtures("prompts")
def test_ppo_learns_to_prefer_a_letter(train: Train, tmp_path: Path) -> None:
    lines = train("train_ppo", f"{PPO} --num_episodes 30 --rollout_batch_size 64 --max_epochs 2")
    assert len(lines) == 30
    assert fmean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert fmean(line["reward"] for line in lines[-5:]) > 0.8
    assert fmean(line["value_loss"] for line in lines[-5:]) < 0.5 * lines[0]["value_loss"]  # the critic learns too
    assert lines[0]["kl_k3"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0.5
    samples = [json.loads(line) for line in (tmp_path / "out" / "logs" / "samples.jsonl").read_text().splitlines()]
    assert fmean("a" in sample["response"] for sample in samples[-20:]) > 0.8


CRITIC_FREE = [
    "reinforce",
    "group_norm --use_kl_loss --kl_estimator k3",
    "dr_grpo --dynamic_sampling --dynamic_sampling_max_batches 2 --enable_ema",
    "remax",
    "rloo --policy_loss_type cispo --rollout_correction tis",
    *(
        pytest.param(flags, marks=pytest.mark.slow)
        for flags in (
            "reinforce_baseline",
            "rloo",
            "group_norm --policy_loss_type gspo --eps_clip 0.02 --eps_clip_high 0.03",
        )
    ),
]


@pytest.mark.usefixtures("prompts")
@pytest.mark.parametrize("estimator", CRITIC_FREE)
def test_every_estimator_without_a_critic_learns_to_prefer_a_letter(train: Train, estimator: str) -> None:
    more = f"--num_episodes 8 --rollout_batch_size 16 --n_samples_per_prompt 4 --advantage_estimator {estimator}"
    lines = train("train_ppo", f"{PPO} {more}")
    assert fmean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert fmean(line["reward"] for line in lines[-4:]) > 0.7
    assert not any("value_loss" in line for line in lines)


DATA = "--dataset train.jsonl --eval_dataset heldout.jsonl --train_batch_size 32 --micro_train_batch_size 32"


def test_sft_learns_to_copy_the_last_letter(random_llama: Callable[[str], None], train: Train, tmp_path: Path) -> None:
    random_llama(LETTERS)
    rng = random.Random(0)
    words = [word(rng, 1, 6, "abcdefg") for _ in range(320)]
    rows = [{"input": letters + "h", "output": letters[-1] * 3} for letters in words]
    write_rows(tmp_path / "train.jsonl", rows[:256])
    write_rows(tmp_path / "heldout.jsonl", rows[256:])
    lines = train("train_sft", f"{DATA} --max_epochs 10 --learning_rate 1e-2")
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert lines[0]["loss"] > 2.0  # a random model: log(11) = 2.4
    assert len(evaluated) == 10
    assert evaluated[-1] < 0.1  # without a look at the prompt: log(7) / 4 = 0.49 at best


def solution(rng: random.Random) -> dict[str, object]:
    """Two to five sums, each followed by the placeholder; half of them are wrong."""
    text, labels = "", []
    for _ in range(rng.randint(2, 5)):
        a, b, right = rng.randint(0, 4), rng.randint(0, 4), rng.random() < 0.5
        result = a + b if right else rng.choice([n for n in range(9) if n != a + b])
        text += f"{a}+{b}={result}#"
        labels.append("G" if right else "B")
    return {"input": text, "label": labels}


def test_prm_learns_to_tell_right_sums_from_wrong_ones(
    random_llama: Callable[[str], None], train: Train, tmp_path: Path
) -> None:
    random_llama("#GB+=;012345678")
    rng = random.Random(0)
    for name, n in (("train", 2048), ("heldout", 128)):
        write_rows(tmp_path / f"{name}.jsonl", [solution(rng) for _ in range(n)])
    lines = train(
        "train_prm",
        """--dataset train.jsonl --eval_dataset heldout.jsonl --input_key input --label_key label --placeholder_token #
        --reward_tokens G B --max_epochs 8 --train_batch_size 64 --micro_train_batch_size 64 --learning_rate 1e-2""",
    )
    evaluated = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert lines[0]["loss"] > 0.6  # a random model: log(2) = 0.69
    assert evaluated[-1] > 0.9  # always "wrong" or always "right": about 0.5
