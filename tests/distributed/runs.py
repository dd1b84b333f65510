"""What runs left behind."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Rows = list[dict[str, Any]]


def rows(file: Path) -> Rows:
    """JSON lines; none without the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def logged(model: Path, file: str = "metrics") -> Rows:
    """A log in the folder of a model, without what tells the time."""
    lines = rows(model / "logs" / f"{file}.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time", "speed/"))} for line in lines]


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
    files = {f"{name}/{f.name}": f for name, place in places.items() for f in place.glob("*.safetensors")}
    files |= {f.name: f for f in model.glob("rollouts/*.jsonl")}
    return Run(
        *(logged(model, file) for file in ("metrics", "samples", "tokens")),
        {name: state[name] for name in ("step", "models", "best", "trainer")},
        {name: file.read_bytes() for name, file in files.items()},
    )
