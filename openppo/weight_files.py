"""Weights on disk: which folders hold some, and files that safetensors would write for their owner alone."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
"""Files by which the folder of a model, or of adapters, is known."""


def holds_model(folder: Path) -> bool:
    """Test for weights of a model or of adapters in ``folder``."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file that is as open to others as the umask says."""
    save_file(tensors, file)
    set_usual_mode([file])


def set_usual_mode(files: Iterable[Path]) -> None:
    """Make files as open to others as the umask says: safetensors 0.8 writes them for their owner alone."""
    for file in files:
        probe = file.with_name(
            f".{file.name}.mode"
        )  # the umask itself cannot be read without a change to it
        probe.touch()
        shutil.copymode(probe, file)
        probe.unlink()
