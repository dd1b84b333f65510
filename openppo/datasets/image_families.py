"""Families of models that are tested with images."""

from typing import Any

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "idefics3")
"""Types of models; tests compare their sampling and training with images."""


def check_images(config: Any, model: str) -> None:
    """Raise ``ValueError`` for a family whose image inputs are not tested; ``model`` is a flag and a name."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"{model} is of type {config.model_type}, and with images only {', '.join(FAMILIES)} were compared "
            "with transformers. Use one of them, or rows without images."
        )
