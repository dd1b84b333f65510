"""SFT, reward models and process reward models on two ranks: peft and transformers alone read what is saved.

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
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GraniteConfig,
)

from openppo.models.pretrained import check_model
from tests.distributed.runs import Rows, logged, rows

Run = Callable[..., tuple[Path, Rows]]
Launch = Callable[..., str]
LORA = pytest.mark.parametrize("lora", ["", "--lora_rank 4"], ids=["full", "LoRA"])


@pytest.fixture
def run(tiny: Path, tmp_path: Path, launch: Launch) -> Run:
    """``run(command, flags, lora, rows)`` trains on ``rows``; returns the saved folder and the metrics."""

    def train(
        command: str, flags: str, lora: str, data: Rows, real: bool = False
    ) -> tuple[Path, Rows]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        arguments = f"""--pretrain {tiny}/actor --dataset rows.jsonl --eval_dataset rows.jsonl --max_epochs 3
            --train_batch_size 10 --micro_train_batch_size 2 --learning_rate 1e-2 --save_path model {flags} {lora}"""
        launch(2, "-m", f"openppo.cli.{command}", *arguments.split(), cwd=tmp_path, real=real)
        if lora:
            saved = load_file(tmp_path / "model" / "adapter_model.safetensors")
            assert all("lora_" in name or name.endswith(".score.weight") for name in saved)
            assert all(tensor.any() for tensor in saved.values()), "untrained or empty"
        return tmp_path / "model", logged(tmp_path / "model")

    return train


def readers(lora: str) -> list[Any]:
    """How users read the saved folder of a language model."""
    return [AutoModelForCausalLM, *([AutoPeftModelForCausalLM] if lora else [])]


def encode(tokenizer: Any, text: str) -> Tensor:
    """Token ids (1, L)."""
    return tokenizer(text, return_tensors="pt")["input_ids"]


@LORA
@torch.no_grad()
def test_sft(tiny, run, lora):
    data = rows(tiny / "sft.jsonl")
    folder, lines = run(
        "train_sft", "--zero_stage 3 --gradient_checkpointing", lora, data, real=not lora
    )
    assert [line["step"] for line in lines if "eval_loss" in line] == [
        3,
        6,
        9,
    ]  # 26 rows: 10, 10 and 6, three times
    assert lines[-1]["loss"] < lines[0]["loss"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for auto in readers(lora):
        model, losses = auto.from_pretrained(folder), []
        for row in data:
            ids, n_prompt = (
                encode(tokenizer, row["input"] + row["output"] + "<eos>"),
                len(row["input"]),
            )
            logits = model(input_ids=ids).logits[0, n_prompt - 1 : -1]
            losses += F.cross_entropy(logits, ids[0, n_prompt:], reduction="none").tolist()
        assert lines[-1]["eval_loss"] == pytest.approx(fmean(losses), rel=1e-4)


@LORA
@torch.no_grad()
def test_rm(tiny, run, lora):
    data = rows(tiny / "preference.jsonl")
    more = f"--zero_stage {3 if lora else 2} --prompt_key prompt --margin_key margin --max_epochs 8"
    folder, lines = run("train_rm", more, lora, data)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for auto in (
        AutoModelForSequenceClassification,
        *([AutoPeftModelForSequenceClassification] if lora else []),
    ):
        model = auto.from_pretrained(folder, num_labels=1)
        texts = [
            row["prompt"] + row[side] + "<eos>" for side in ("chosen", "rejected") for row in data
        ]
        scores = torch.stack(
            [model(input_ids=encode(tokenizer, text)).logits[0, 0] for text in texts]
        )
        chosen, rejected = scores.chunk(2)
        assert lines[-1]["eval_chosen_reward"] == pytest.approx(chosen.mean().item(), rel=1e-4)
        assert lines[-1]["eval_accuracy"] == pytest.approx(
            (chosen > rejected).float().mean().item()
        )
    assert lines[-1]["eval_accuracy"] > 0.8
    config = check_model(str(folder), "--reward_pretrain")  # where --normalize_reward finds them
    assert config.mean == pytest.approx(scores.mean().item(), rel=1e-4)
    assert config.std == pytest.approx(scores.std().item(), rel=1e-4)


@LORA
@torch.no_grad()
def test_prm(run, lora):
    data = [
        {"input": "cdhefhgh", "label": ["a", "b", "a"]},
        {"input": "gchdh", "label": ["b", "b"]},
    ] * 8
    more = "--zero_stage 2 --placeholder_token h --reward_tokens a b --input_key input"
    folder, lines = run("train_prm", more, lora, data)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    good, bad, placeholder = tokenizer.convert_tokens_to_ids(["a", "b", "h"])
    for auto in readers(lora):
        model, losses = auto.from_pretrained(folder), []
        for row in data:
            ids = encode(tokenizer, row["input"])
            judged = model(input_ids=ids).logits[0, ids[0] == placeholder][:, [good, bad]]
            targets = torch.tensor([["a", "b"].index(label) for label in row["label"]])
            losses += F.cross_entropy(judged, targets, reduction="none").tolist()
        assert lines[-1]["eval_loss"] == pytest.approx(fmean(losses), rel=1e-4)


def test_an_architecture_without_classifier_and_with_tied_embeddings_trains(tiny, tmp_path, launch):
    """Granite, as reward model, whose run is resumed, and as policy and critic."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "actor")
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = GraniteConfig(
        vocab_size=len(tokenizer), tie_word_embeddings=True, initializer_range=0.2, **sizes, **ends
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "granite")
    tokenizer.save_pretrained(tmp_path / "granite")
    arguments = f"""--pretrain granite --dataset {tiny}/preference.jsonl --eval_dataset {tiny}/preference.jsonl
        --prompt_key prompt --train_batch_size 26 --learning_rate 1e-2 --zero_stage 3 --save_path rm --save_steps 2"""
    for more in ("--max_epochs 2", "--max_epochs 4 --load_checkpoint"):
        launch(2, "-m", "openppo.cli.train_rm", *arguments.split(), *more.split(), cwd=tmp_path)
    assert logged(tmp_path / "rm")[-1]["step"] == 4
    arguments = f"""--pretrain granite --reward_pretrain rm --critic_pretrain granite --prompt_data {tiny}/prompts.jsonl
        --rollout_batch_size 12 --train_batch_size 12 --generate_max_len 8 --actor_learning_rate 1e-3
        --critic_learning_rate 1e-3 --zero_stage 3 --save_value_network --save_path model"""
    output = launch(2, "-m", "openppo.cli.train_ppo", *arguments.split(), cwd=tmp_path)
    assert "fresh scalar head for the critic" in output
    folders = ("model", "model_critic", "granite")
    policy, critic, before = (
        set(load_file(tmp_path / folder / "model.safetensors")) for folder in folders
    )
    assert policy == before == critic - {"score.weight"}
    assert "lm_head.weight" not in policy
