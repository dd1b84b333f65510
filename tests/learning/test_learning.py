"""The trainers learn: from a random model of two layers, in seconds, through the commands that users run."""

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

LETTERS = "abcdefgh"
Train = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture
def model(random_llama: Callable[[str], Path]) -> Path:
    """A Llama of two layers with random weights, and a tokenizer with one token per letter."""
    return random_llama(LETTERS)


@pytest.fixture
def train(model: Path, run_command: Callable[..., list[dict[str, Any]]]) -> Train:
    """``train(command, arguments)`` runs a command on that model in one process; returns the logged metrics."""

    def run(name: str, arguments: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", f"openppo.cli.{name}", "--pretrain", str(model), "--save_path", "out"]
        return run_command([*command, *arguments.split()])

    return run


def write_rows(file: Path, rows: Iterable[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def word(rng: random.Random, least: int, most: int, letters: str = LETTERS) -> str:
    return "".join(rng.choices(letters, k=rng.randint(least, most)))


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def test_ppo_learns_to_prefer_a_letter(train: Train, tmp_path: Path) -> None:
    rng = random.Random(0)
    write_rows(tmp_path / "prompts.jsonl", [{"input": word(rng, 1, 6)} for _ in range(64)])
    (tmp_path / "reward.py").write_text(
        "def reward_fn(prompts, responses, labels):\n"
        "    return [response.count('a') / max(len(response), 1) for response in responses]\n"
    )
    lines = train(
        "train_ppo",
        """--reward_fn reward.py --prompt_data prompts.jsonl --num_episodes 30 --rollout_batch_size 64
        --train_batch_size 32 --micro_train_batch_size 32 --micro_rollout_batch_size 64 --max_epochs 2
        --generate_max_len 8 --actor_learning_rate 3e-3 --critic_learning_rate 3e-3""",
    )
    assert len(lines) == 30
    assert mean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert mean(line["reward"] for line in lines[-5:]) > 0.8
    assert mean(line["value_loss"] for line in lines[-5:]) < 0.5 * lines[0]["value_loss"]  # the critic learns too
    assert lines[0]["kl_k3"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0.5
    samples = [json.loads(line) for line in (tmp_path / "out" / "logs" / "samples.jsonl").read_text().splitlines()]
    assert mean(sample["response"].count("a") > 0 for sample in samples[-20:]) > 0.8


CRITIC_FREE = [
    "--advantage_estimator reinforce",
    "--advantage_estimator reinforce_baseline",
    "--advantage_estimator rloo",
    "--advantage_estimator group_norm --use_kl_loss --kl_estimator k3",
    "--advantage_estimator dr_grpo --dynamic_sampling --dynamic_sampling_max_batches 2 --enable_ema",
    "--advantage_estimator remax",
    "--advantage_estimator group_norm --policy_loss_type gspo --eps_clip 0.02 --eps_clip_high 0.03",
    "--advantage_estimator rloo --policy_loss_type cispo --rollout_correction tis",
]


@pytest.mark.parametrize("algorithm", CRITIC_FREE)
def test_every_estimator_without_a_critic_learns_to_prefer_a_letter(
    train: Train, tmp_path: Path, algorithm: str
) -> None:
    rng = random.Random(0)
    write_rows(tmp_path / "prompts.jsonl", [{"input": word(rng, 1, 6)} for _ in range(64)])
    (tmp_path / "reward.py").write_text(
        "def reward_fn(prompt, response):\n    return response.count('a') / max(len(response), 1)\n"
    )
    lines = train(
        "train_ppo",
        f"""--reward_fn reward.py --prompt_data prompts.jsonl --num_episodes 8 --rollout_batch_size 16
        --n_samples_per_prompt 4 --train_batch_size 32 --micro_train_batch_size 32 --micro_rollout_batch_size 64
        --generate_max_len 8 --actor_learning_rate 3e-3 {algorithm}""",
    )
    assert mean(line["reward"] for line in lines[:2]) < 0.25  # a random policy: 1/8
    assert mean(line["reward"] for line in lines[-4:]) > 0.7
    assert not any("value_loss" in line for line in lines)


def test_sft_learns_to_copy_the_last_letter(train: Train, tmp_path: Path) -> None:
    rng = random.Random(0)
    words = [word(rng, 1, 6, "abcdefg") for _ in range(320)]
    rows = [{"input": letters + "h", "output": letters[-1] * 3} for letters in words]
    write_rows(tmp_path / "train.jsonl", rows[:256])
    write_rows(tmp_path / "heldout.jsonl", rows[256:])
    lines = train(
        "train_sft",
        """--dataset train.jsonl --eval_dataset heldout.jsonl --max_epochs 10 --train_batch_size 32
        --micro_train_batch_size 32 --learning_rate 1e-2""",
    )
    evaluated = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert lines[0]["loss"] > 2.0  # a random model: log(11) = 2.4
    assert len(evaluated) == 10
    assert evaluated[-1] < 0.1  # without a look at the prompt: log(7) / 4 = 0.49 at best


def test_rm_learns_a_preference(train: Train, tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [
        {"prompt": word(rng, 1, 4), "chosen": word(rng, 4, 8, "aabcd"), "rejected": word(rng, 4, 8, "efghb")}
        for _ in range(320)
    ]
    write_rows(tmp_path / "train.jsonl", rows[:256])
    write_rows(tmp_path / "heldout.jsonl", rows[256:])
    lines = train(
        "train_rm",
        """--dataset train.jsonl --eval_dataset heldout.jsonl --prompt_key prompt --max_epochs 6 --train_batch_size 32
        --micro_train_batch_size 32 --learning_rate 3e-3""",
    )
    assert lines[0]["loss"] > 0.5
    assert lines[-1]["eval_accuracy"] > 0.9
    assert lines[-1]["eval_chosen_reward"] > lines[-1]["eval_rejected_reward"] + 1
