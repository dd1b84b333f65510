"""What runs left behind, and a chat model for them."""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import save_tokenizer

Rows = list[dict[str, Any]]
OPTIONS = Path(__file__).parent / "options"
"""Files for --config, of options that are no flags."""


def rows(file: Path) -> Rows:
    """JSON lines; none without the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logged(model: Path, file: str = "metrics") -> Rows:
    """A log in the folder of a model, without what tells the time."""
    lines = rows(model / "logs" / f"{file}.jsonl")
    return [
        {k: v for k, v in line.items() if not k.startswith(("time", "speed/"))} for line in lines
    ]


def outcome(folder: Path) -> dict[str, Any]:
    """What ``run_cases.py`` wrote of a case, with ``folder`` and ``logged``, the metrics."""
    result = json.loads((folder / "result.json").read_text())
    return {"folder": folder, "logged": logged(folder / "model"), **result}


def vector(model: Path) -> Tensor:
    """All weights of a saved model as one vector."""
    weights = load_file(model / "model.safetensors")
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


@dataclass(frozen=True)
class Run:
    """All that two runs have in common if they did the same."""

    metrics: Rows
    samples: Rows
    tokens: Rows
    state: dict[str, Any]
    """What the trainer remembers in the newest checkpoint."""
    files: dict[str, bytes]
    """Weights, the newest checkpoint's tensors, the best model, dumped rollouts."""


def left_by(model: Path) -> Run:
    """All that a run left in its ``save_path``."""
    (checkpoints,) = model.glob("checkpoints_*")
    newest, best = checkpoints / "latest", checkpoints / "best"
    state = json.loads((newest / "state.json").read_text())
    places = {"model": model, "checkpoint": newest, "in checkpoint": newest / "model", "best": best}
    files = {
        f"{name}/{f.name}": f for name, place in places.items() for f in place.glob("*.safetensors")
    }
    files |= {f.name: f for f in model.glob("rollouts/*.jsonl")}
    return Run(
        *(logged(model, file) for file in ("metrics", "samples", "tokens")),
        {name: state[name] for name in ("step", "models", "best", "trainer")},
        {name: file.read_bytes() for name, file in files.items()},
    )


CHAT = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}<eos>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def save_chat_model(folder: Path) -> Path:
    """A model of two layers with a chat template and a token for each character."""
    marks = ["<user>", "<assistant>", "<system>", "<tool>"]
    tokenizer = save_tokenizer(folder, string.printable, marks, chat_template=CHAT)
    torch.manual_seed(7)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        initializer_range=0.2,
        **sizes,
        **ends,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
