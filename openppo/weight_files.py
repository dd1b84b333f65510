"""Weights on disk: folders of models, and the usual mode for files of safetensors."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
"""Files that mark the folder of a model, or of adapters."""


def holds_model(folder: Path) -> bool:
    """True if ``folder`` holds a model or adapters."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the mode that the umask gives."""
    save_file(tensors, file)
    set_usual_mode([file])


def set_usual_mode(files: Iterable[Path]) -> None:
    """Give files the mode of the umask: safetensors 0.8 writes them for their owner alone."""
    for file in files:
        # The umask itself cannot be read without changing it.
        probe = file.with_name(f".{file.name}.mode")
        probe.touch()
        shutil.copymode(probe, file)
        probe.unlink()
