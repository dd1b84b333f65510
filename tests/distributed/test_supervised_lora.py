"""SFT, reward models and process reward models with LoRA on two ranks: peft and transformers alone read what is saved.

Each model, read that way, repeats what the command measured on the held-out data last.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openppo.models.pretrained import check_model

Run = Callable[[str, str, list[dict[str, Any]]], tuple[Path, dict[str, Any]]]


@pytest.fixture
def run(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> Run:
    """``run(command, flags, rows)`` trains adapters on ``rows``; returns the saved folder and the last metrics."""

    def train(command: str, flags: str, rows: list[dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = f"""--pretrain {tiny}/actor --dataset rows.jsonl --eval_dataset rows.jsonl --max_epochs 3
            --train_batch_size 10 --micro_train_batch_size 2 --learning_rate 1e-2 --lora_rank 4 --save_path lora
            {flags}"""
        launch(2, "-m", f"openppo.cli.{command}", *arguments.split(), cwd=tmp_path)
        lines = (tmp_path / "lora" / "logs" / "metrics.jsonl").read_text().splitlines()
        saved = load_file(tmp_path / "lora" / "adapter_model.safetensors")
        assert all("lora_" in name or name.endswith(".score.weight") for name in saved)
        assert all(tensor.any() for tensor in saved.values()), "untrained or empty"
        return tmp_path / "lora", json.loads(lines[-1])

    return train


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids (1, L)."""
    return tokenizer(text, return_tensors="pt")["input_ids"]


@torch.no_grad()
def test_sft(tiny: Path, run: Run) -> None:
    rows = rows_of(tiny / "sft.jsonl")
    folder, metrics = run("train_sft", "--zero_stage 3 --gradient_checkpointing", rows)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        model, losses = auto.from_pretrained(folder), []
        for row in rows:
            ids, n_prompt = encode(tokenizer, row["input"] + row["output"] + "<eos>"), len(row["input"])
            logits = model(input_ids=ids).logits[0, n_prompt - 1 : -1]
            losses += F.cross_entropy(logits, ids[0, n_prompt:], reduction="none").tolist()
        assert metrics["eval_loss"] == pytest.approx(fmean(losses), rel=1e-4)


@torch.no_grad()
def test_rm(tiny: Path, run: Run) -> None:
    rows = rows_of(tiny / "preference.jsonl")
    folder, metrics = run("train_rm", "--zero_stage 3 --prompt_key prompt", rows)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for auto in (AutoPeftModelForSequenceClassification, AutoModelForSequenceClassification):
        model = auto.from_pretrained(folder, num_labels=1)
        texts = [row["prompt"] + row[side] + "<eos>" for side in ("chosen", "rejected") for row in rows]
        scores = torch.stack([model(input_ids=encode(tokenizer, text)).logits[0, 0] for text in texts])
        chosen, rejected = scores.chunk(2)
        assert metrics["eval_chosen_reward"] == pytest.approx(chosen.mean().item(), rel=1e-4)
        assert metrics["eval_accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    config = check_model(str(folder), "--reward_pretrain")  # where --normalize_reward finds them
    assert config.mean == pytest.approx(scores.mean().item(), rel=1e-4)
    assert config.std == pytest.approx(scores.std().item(), rel=1e-4)


@torch.no_grad()
def test_prm(run: Run) -> None:
    rows = [{"input": "cdhefhgh", "label": ["a", "b", "a"]}, {"input": "gchdh", "label": ["b", "b"]}] * 8
    folder, metrics = run(
        "train_prm", "--zero_stage 2 --placeholder_token h --reward_tokens a b --input_key input", rows
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    good, bad, placeholder = tokenizer.convert_tokens_to_ids(["a", "b", "h"])
    for auto in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        model, losses = auto.from_pretrained(folder), []
        for row in rows:
            ids = encode(tokenizer, row["input"])
            judged = model(input_ids=ids).logits[0, ids[0] == placeholder][:, [good, bad]]
            targets = torch.tensor([["a", "b"].index(label) for label in row["label"]])
            losses += F.cross_entropy(judged, targets, reduction="none").tolist()
        assert metrics["eval_loss"] == pytest.approx(fmean(losses), rel=1e-4)
