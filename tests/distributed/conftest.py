"""Inputs small enough to train on a laptop's CPU in a second."""

import datetime
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
VOCABULARY = ["<pad>", "<eos>", "<unk>", *LETTERS]


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token per character, no BOS."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def _write_rows(file: Path, rows: Sequence[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(tokenizer: PreTrainedTokenizerFast, **more: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,  # the default gives a nearly uniform policy, on which little can go wrong
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **more,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models ``actor`` and ``reward``, both with tokenizer, and JSON lines of each kind of data.

    ``prompts`` (input, label), ``documents`` (input), ``sft`` (input, output), ``preference`` (prompt, chosen,
    rejected, margin): texts of unequal length. Chosen texts say "a" more often than rejected ones. ``dated`` are
    prompts with dates as labels, in Parquet.
    """
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    tokenizer = _write_tokenizer(folder / "actor")
    LlamaForCausalLM(_config(tokenizer)).save_pretrained(folder / "actor")
    _write_tokenizer(folder / "reward")
    LlamaForSequenceClassification(_config(tokenizer, num_labels=1)).save_pretrained(folder / "reward")

    rng = random.Random(7)

    def text(least: int, most: int, letters: str = LETTERS) -> str:
        return "".join(rng.choices(letters, k=rng.randint(least, most)))

    _write_rows(folder / "prompts.jsonl", [{"input": text(1, 9), "label": i} for i in range(24)])
    _write_rows(folder / "documents.jsonl", [{"input": text(1, 24)} for _ in range(14)])
    _write_rows(folder / "sft.jsonl", [{"input": text(1, 9), "output": text(1, 9)} for _ in range(26)])
    _write_rows(
        folder / "preference.jsonl",
        [
            {"prompt": text(1, 5), "chosen": text(2, 9, "aab"), "rejected": text(2, 9, "bcd"), "margin": 0.5 * (i % 3)}
            for i in range(26)
        ],
    )
    dated = [{"input": text(1, 9), "label": datetime.date(2026, 11, 1 + i)} for i in range(24)]
    pq.write_table(pa.Table.from_pylist(dated), folder / "dated.parquet")
    return folder


@dataclass(frozen=True)
class Run:
    """What a training run left behind, but for what tells the time."""

    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    tokens: list[dict[str, Any]]
    state: dict[str, Any]
    """What the trainer remembers in the newest checkpoint."""
    files: dict[str, bytes]
    """Weights, the newest checkpoint's tensors, the best model."""


def _lines(file: Path) -> list[dict[str, Any]]:
    parsed = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{k: v for k, v in line.items() if not k.startswith(("time", "speed/"))} for line in parsed]


@pytest.fixture(scope="session")
def left_by() -> Callable[[Path], Run]:
    """``left_by(save_path)`` reads everything that two runs have in common if they did the same."""

    def read(model: Path) -> Run:
        (checkpoints,) = model.glob("checkpoints_*")
        newest, best = checkpoints / "latest", checkpoints / "best"
        state = json.loads((newest / "state.json").read_text())
        places = {"model": model, "checkpoint": newest, "in checkpoint": newest / "model", "best": best}
        files = {f"{name}/{f.name}": f for name, place in places.items() for f in place.glob("*.safetensors")}
        return Run(
            _lines(model / "logs" / "metrics.jsonl"),
            _lines(model / "logs" / "samples.jsonl"),
            _lines(model / "logs" / "tokens.jsonl"),
            {name: state[name] for name in ("step", "models", "best", "trainer")},
            {name: file.read_bytes() for name, file in files.items()},
        )

    return read
