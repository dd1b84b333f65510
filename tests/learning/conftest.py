"""A model with random weights, and a way to run the commands that users run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<unk>"]


@pytest.fixture
def random_llama(tmp_path: Path) -> Callable[[str], Path]:
    """``random_llama(characters)``: the folder of a Llama of two layers whose tokens are these characters."""

    def save(characters: str) -> Path:
        core = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *characters])}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        core.decoder = decoders.Fuse()
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
        tokenizer.save_pretrained(tmp_path / "model")
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.fixture
def run_command(run: Callable[..., str], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``run_command(words, **variables)``: the metrics that a command logs in the folder ``out``."""

    def logged(words: list[str], **variables: str) -> list[dict[str, Any]]:
        run(words, tmp_path, **variables)
        return [json.loads(line) for line in (tmp_path / "out" / "logs" / "metrics.jsonl").read_text().splitlines()]

    return logged
