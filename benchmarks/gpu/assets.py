"""Models and prompts of the stages, built on first use, and what is counted of them."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.models import SHAPES, Shape, build
from benchmarks.gpu.rows import DRY, WORK, emit
from benchmarks.peers.measure import ModelSize

_MEMORY = Path("/dev/shm")
_GIB = {"7b": 20.0, "0.5b": 2.0}


def shape_of(name: str) -> Shape:
    """A model's shape; a dry run has one for all."""
    return SHAPES["tiny" if DRY else name]


def model_size(shape: Shape) -> ModelSize:
    """A shape as operations and bytes are counted by."""
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    return ModelSize(
        shape.layers, shape.hidden, shape.hidden, kv_width, shape.intermediate, shape.vocabulary
    )


def adapter_entries(shape: Shape, rank: int) -> int:
    """Parameters of LoRA's matrices on all linear layers."""
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    attention = 4 * shape.hidden + 2 * (shape.hidden + kv_width)
    return rank * shape.layers * (attention + 3 * (shape.hidden + shape.intermediate))


def scratch(gib: float) -> Path:
    """A folder for files of this size: in memory where twice as much is free, else on the disk."""
    in_memory = not DRY and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * gib * 2**30
    return _MEMORY / "openppo-gpu" if in_memory else WORK


def assets_of(name: str) -> Path:
    """The folder with ``policy`` and ``prompts.jsonl`` of a model."""
    gib = _GIB.get(name, 1.0)
    for place in (scratch(0.0), WORK):
        if (place / "assets" / name / "policy").exists():
            return place / "assets" / name
    folder, began = scratch(gib) / "assets" / name, time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    build(shape_of(name), folder)
    emit("assets", model=name, seconds=round(time.perf_counter() - began, 1))
    return folder


def assets() -> None:
    """Build the 0.5B model."""
    assets_of("0.5b")


def seconds(work: Callable[[], Any]) -> float:
    """Seconds of one call, with the GPU's work."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
