"""train_prm learns to judge steps: from a random model of two layers, in seconds, through the command."""

import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Metrics = list[dict[str, Any]]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(random_llama: Callable[[str], Path]) -> Path:
    """A Llama of two layers with random weights, and a tokenizer with one token per character."""
    return random_llama("#GB+=;012345678")


@pytest.fixture
def train(run_command: Callable[..., Metrics]) -> Callable[[str], Metrics]:
    """``train(arguments)``: the metrics of train_prm."""
    return lambda arguments: run_command([sys.executable, "-m", "openppo.cli.train_prm", *arguments.split()])


def write_solutions(file: Path, rng: random.Random, count: int) -> None:
    file.write_text("\n".join(json.dumps(solution(rng)) for _ in range(count)))


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
    model: Path, train: Callable[[str], Metrics], tmp_path: Path
) -> None:
    rng = random.Random(0)
    write_solutions(tmp_path / "train.jsonl", rng, 2048)
    write_solutions(tmp_path / "heldout.jsonl", rng, 128)
    arguments = """--pretrain model --dataset train.jsonl --eval_dataset heldout.jsonl --input_key input
        --label_key label --placeholder_token # --reward_tokens G B --max_epochs 8 --train_batch_size 64
        --micro_train_batch_size 64 --learning_rate 1e-2 --save_path out"""
    lines = train(arguments)
    evaluated = [line["eval_accuracy"] for line in lines if "eval_accuracy" in line]
    assert lines[0]["loss"] > 0.6  # a random model: log(2) = 0.69
    assert evaluated[-1] > 0.9  # always "wrong" or always "right": about 0.5

    judge = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    good, bad = tokenizer.convert_tokens_to_ids(["G", "B"])
    sums = [(a, b) for a in range(5) for b in range(5)]
    texts = [f"{a}+{b}={a + b}#{b}+{a}={(a + b + 1) % 9}#" for a, b in sums]  # the first right, the second wrong
    with torch.no_grad():
        logits = judge(**tokenizer(texts, return_tensors="pt")).logits[:, [5, 11]]  # (25, 2, V)
    right = (logits[..., good] > logits[..., bad]) == torch.tensor([True, False])
    assert right.float().mean(0).min() > 0.8  # the saved model says it too


@pytest.mark.parametrize("name", ["samples_math-shepherd", "mr_gsm8k_labelled"])
def test_prm_trains_on_published_process_data(
    name: str, train: Callable[[str], Metrics], tmp_path: Path, assets: Path
) -> None:
    tokenizer, data = assets / "tokenizers" / "phi3-mini", assets / "data" / "prm" / f"{name}.jsonl"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=32064, **sizes)).save_pretrained(tmp_path / "model")
    arguments = f"--pretrain model --dataset {data} --max_len 1024 --train_batch_size 7 --max_steps 1"
    [line] = train(f"{arguments} --max_samples 14 --save_path out")
    assert line["loss"] == pytest.approx(math.log(2), abs=0.2)
    assert 0 <= line["accuracy"] <= 1


def test_script_to_copy_runs(model: Path, run_command: Callable[..., Metrics], tmp_path: Path) -> None:
    write_solutions(tmp_path / "rows.jsonl", random.Random(0), 8)
    script = str(REPO / "examples" / "scripts" / "train_prm.sh")
    flags = "--placeholder_token # --reward_tokens G B --train_batch_size 4"
    variables = {"GPUS": "2", "PRETRAIN": "model", "DATASET": "rows.jsonl", "SAVE_PATH": "out"}
    assert len(run_command(["bash", script, *flags.split()], **variables)) == 2
    assert (tmp_path / "out" / "model.safetensors").is_file()
