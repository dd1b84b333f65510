"""What a run ran on: versions, hosts, devices."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openppo import __version__
from openppo.types import Comm

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "numpy", "vllm", "flash-attn", "bitsandbytes")


def environment(comm: Comm) -> dict[str, Any]:
    """Versions on this rank, and host and device of every rank; all ranks call it together."""
    return {
        "openppo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "world_size": comm.world_size,
        "ranks": comm.all_gather_object({"host": socket.gethostname(), **_device()}),
    }


def save_environment(folder: Path, found: Mapping[str, Any]) -> None:
    """Write ``<folder>/environment.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {"device": found.name, "memory_gib": round(found.total_memory / 2**30, 1)}
    return {"device": f"CPU ({platform.machine()})", "cores": os.cpu_count(), "threads": torch.get_num_threads()}
