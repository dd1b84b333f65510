"""Options of models: places, loading, adapters."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openppo.config.fields import Options, at_least, inside, not_negative, option


@dataclass(frozen=True)
class ModelConfig(Options):
    """A model and its loading."""

    pretrain: str = option(place=True, resume="must match")
    """Model to start from: a local folder or a hub name."""
    flash_attn: bool = field(default=False, kw_only=True)
    """Use FlashAttention-2 (must be installed) instead of PyTorch's attention."""
    trust_remote_code: bool = field(default=False, kw_only=True)
    """Run Python code from the model or tokenizer repository, with your permissions; else such models are refused."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig(Options):
    """Parts of a vision-language model that may stay frozen."""

    freeze_vision_tower: bool = option(True, resume="must match")
    """Do not train the part of the model that reads images."""
    freeze_connector: bool = option(False, resume="must match")
    """Do not train the part of the model that maps features of images to embeddings."""


@dataclass(frozen=True)
class PPOModelConfig(ModelConfig, VisionConfig):
    """Models by role."""

    pretrain: str = option(place=True, resume="must match")
    """Causal language model to train: a local folder or a hub name."""
    ref_pretrain: str | None = option(None, place=True, resume="must match")
    """Reference model of the KL penalty (default: --pretrain; with LoRA the actor, its adapters off)."""
    critic_pretrain: str | None = option(None, place=True, resume="must match", of_critic=True)
    """Model that the critic starts from (default: the reward model, else the actor)."""
    critic_lora_rank: int | None = option(None, not_negative, resume="must match", of_critic=True)
    """Rank of the critic's adapters (default: --lora_rank; 0: train all of the critic)."""
    value_head_prefix: str = option("score", resume="must match")
    """Name of the scalar head in critic and reward checkpoints."""
    save_value_network: bool = option(False, resume="must match", of_critic=True)
    """Also save the critic, in a folder named as --save_path with '_critic' at the end."""


@dataclass(frozen=True)
class LoRAConfig(Options):
    """Low-rank adapters instead of training all weights."""

    lora_rank: int = option(0, not_negative, "; 0 switches LoRA off", resume="must match")
    """Rank of the adapters (0: no LoRA, all weights are trained)."""
    lora_alpha: int = option(16, at_least(1), resume="must match")
    """Adapters are scaled by this over their rank."""
    lora_dropout: float = option(0.0, inside("[0, 1)"))
    """Dropout on the adapters' input while training; old log-probs are taken without, so ratios start around 1."""
    target_modules: tuple[str, ...] = option(("all-linear",), resume="must match")
    """Names of the linear layers that get an adapter; 'all-linear' takes all but the head."""
    load_in_4bit: bool = option(False, resume="must match")
    """Keep the frozen weights in 4 bits (NF4; needs bitsandbytes, --lora_rank and --zero_stage 0, 1 or 2)."""

    def problems(self) -> Iterator[str]:
        if not self.target_modules:
            yield "--target_modules needs at least one name, or 'all-linear'."
        if self.load_in_4bit and self.lora_rank == 0:
            yield "--load_in_4bit keeps the weights frozen: give --lora_rank, so that there is something to train."


def refuse_overwriting(inputs: Mapping[str, str | None], outputs: Mapping[str, str]) -> None:
    """Refuse output folders that are input models, under whatever spelling.

    The base model of a PEFT folder counts too. None stands for an option that is not given.
    """
    read = [(flag, name) for flag, name in inputs.items() if name]
    for (flag, name), (written_by, folder) in itertools.product(read, outputs.items()):
        for model, relation in ((name, "is"), (_base_of(name), "is the base model of")):
            if model and os.path.realpath(model) == os.path.realpath(folder):
                where = f"{written_by} {folder} {relation} {flag} {name}"
                raise ValueError(f"{where}, which would be overwritten: choose another folder.")


def _base_of(name: str) -> str | None:
    """The base model that a PEFT folder names; None for other folders."""
    try:
        described = json.loads((Path(name) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return described.get("base_model_name_or_path") if isinstance(described, dict) else None
