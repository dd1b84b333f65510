"""A model with random weights, and a way to run the commands that users run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPO = Path(__file__).resolve().parents[2]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 900  # other tests run beside it


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
def run_command(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """``run_command(words, **variables)``: the metrics that a command of the shell logs in the folder ``out``."""

    def run(words: Sequence[str], **variables: str) -> list[dict[str, Any]]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for torchrun
        here = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, **here, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_UNTIL_A_HANG_IS_CERTAIN,
        )
        print(done.stdout)  # pytest shows it when the test fails
        assert done.returncode == 0
        return [json.loads(line) for line in (tmp_path / "out" / "logs" / "metrics.jsonl").read_text().splitlines()]

    return run
