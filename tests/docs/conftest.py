"""A folder with tiny models and data of each kind."""

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

CHAT = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models ``policy`` and ``reward`` with one token per character and a chat template; data as below."""
    folder = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    scores = {"num_labels": 1, "mean": 0.0, "std": 1.0}  # for --normalize_reward
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=2048, **scores, **_special(tokenizer))
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, rows in _data().items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **SIZES,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<unk>", "ки"]  # the last one for process rewards
    letters = [*special, *string.printable]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(letters)}, unk_token="<unk>"))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=CHAT
    )


def _data() -> dict[str, list[dict[str, Any]]]:
    """Eight rows of each kind, made by hand in the forms of the field."""
    talk = "\n\nHuman: Say {}.\n\nAssistant: "
    return {
        "prompts": [{"input": f"say {i}", "label": str(i), "difficulty": i} for i in range(8)],
        "sft": [{"input": f"say {i}", "output": str(i)} for i in range(8)],
        "preference": [{"prompt": f"say {i}", "chosen": str(i), "rejected": "no"} for i in range(8)],
        "math": [{"question": f"What is {i} + {i}?", "answer": f"Add them.\n#### {2 * i}"} for i in range(8)],
        "dialogues": [
            {"chosen": talk.format(i) + str(i), "rejected": talk.format(i) + "I will not."} for i in range(8)
        ],
        "documents": [{"text": f"a document, number {i}"} for i in range(8)],
    }
