"""A student learns from a teacher alone: its KL to the teacher and its loss on held-out answers fall."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.conftest import save_tokenizer

REPO = Path(__file__).parents[2]
LETTERS = "abcdefg"
SFT = """train_sft --dataset answers.jsonl --train_batch_size 32 --micro_train_batch_size 32 --learning_rate 1e-2"""
TEACHER = f"{SFT} --pretrain untaught --save_path teacher --max_epochs 10"
STUDENT = f"{SFT} --pretrain small --save_path student --max_steps 16"
DISTIL = """train_ppo --pretrain student --ref_pretrain teacher --reward_fn none --prompt_data prompts.jsonl
    --eval_data heldout.jsonl --eval_temperature 1 --eval_before_training --save_path out
    --advantage_estimator reinforce --gamma 0 --normalize_advantages off --init_kl_coef 1
    --rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 128 --micro_train_batch_size 128
    --micro_rollout_batch_size 256 --generate_max_len 6 --actor_learning_rate 3e-3 --lr_scheduler constant
    --num_episodes 7"""


def save_model(folder: Path, hidden_size: int, padding: int = 0) -> None:
    """A random Llama of two layers, with embeddings of ``padding`` ids that no token has."""
    tokenizer = save_tokenizer(folder, LETTERS + "h")
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padding,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        **ends,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.no_grad()
def held_out_loss(folder: Path, rows: list[dict[str, str]]) -> float:
    """Cross entropy per token of the right answers and their EOS, by plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = save_tokenizer(folder.with_name("tokenizer"), LETTERS + "h")
    total, n_tokens = 0.0, 0
    for row in rows:
        prompt = tokenizer(row["input"])["input_ids"]
        ids = torch.tensor([*prompt, *tokenizer(row["output"])["input_ids"], 1])
        log_probs = model(input_ids=ids[None]).logits[0, :-1, : len(tokenizer)].log_softmax(-1)
        of_ids = log_probs.gather(-1, ids[1:, None])[len(prompt) - 1 :]
        total -= float(of_ids.sum())
        n_tokens += len(of_ids)
    return total / n_tokens


def test_kl_to_the_teacher_and_held_out_loss_fall(run: Callable[..., str], tmp_path: Path) -> None:
    """The teacher answers with three times the last letter before h; the student is smaller, and half taught."""
    rng = random.Random(0)
    words = ["".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(384)]
    rows = [{"input": word + "h", "output": word[-1] * 3} for word in words]
    write(tmp_path / "answers.jsonl", rows[:256])
    write(tmp_path / "prompts.jsonl", [{"input": row["input"]} for row in rows[:320]])
    write(tmp_path / "heldout.jsonl", [{"input": row["input"]} for row in rows[320:]])
    save_model(tmp_path / "untaught", hidden_size=32, padding=3)
    save_model(tmp_path / "small", hidden_size=24)

    for line in (TEACHER, STUDENT, DISTIL):
        name, *flags = line.split()
        run([sys.executable, "-m", f"openppo.cli.{name}", *flags], tmp_path)

    before, after = (held_out_loss(tmp_path / name, rows[320:]) for name in ("student", "out"))
    assert before > 1.0  # a random model: log(11) = 2.4
    assert after < 0.3 * before
    lines = rows_of(tmp_path / "out/logs/metrics.jsonl")
    held_out = [line["eval_kl"] for line in lines if "eval_kl" in line]
    trained = [line["kl"] for line in lines if "kl" in line]
    assert held_out[0] > 1.0
    assert held_out[-1] < 0.3 * held_out[0]
    assert trained[-1] < 0.3 * trained[0]

    samples = rows_of(tmp_path / "out/logs/samples.jsonl")
    for logged in (*lines, *samples):
        assert [name for name in logged if "reward" in name or "pass@" in name] == []


@pytest.mark.slow
def test_the_script_brings_a_small_student_near_its_teacher(tmp_path: Path) -> None:
    command = ["bash", str(REPO / "examples/scripts/distill.sh")]
    environment = os.environ | {"SAVE_PATH": str(tmp_path / "run")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    report = json.loads((tmp_path / "run/report.json").read_text())
    teacher, before, after = (report[name] for name in ("teacher", "before", "after"))
    assert teacher["exact match"] > after["exact match"] > before["exact match"]
    assert after["loss"] < before["loss"]
    assert after["kl"] < 0.5 * before["kl"]
