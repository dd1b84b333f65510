"""Options of models: places, loading, adapters."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """Reference model of the KL penalty (default: --pretrain; with --lora_rank the actor, its adapters off; with
    --lora_path the actor, its adapters as they began)."""
    critic_pretrain: str | None = option(None, place=True, resume="must match", of_critic=True)
    """Model that the critic starts from (default: the reward model, else the actor)."""
    critic_lora_rank: int | None = option(None, not_negative, resume="must match", of_critic=True)
    """Rank of the critic's adapters (default: --lora_rank; 0: train all of the critic)."""
    value_head_prefix: str = option("score", resume="must match", of_files=True)
    """Name of the scalar head in critic and reward checkpoints."""
    save_value_network: bool = option(False, resume="must match", of_critic=True)
    """Also save the critic, in a folder named as --save_path with '_critic' at the end."""


_UNKNOWN_PARTS = (
    "use_dora",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "alora_invocation_tokens",
    "megatron_config",
)
"""Entries of an ``adapter_config.json`` beside plain matrices."""
_CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq")
"""Starts of adapters that change the weights below them."""


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
    lora_path: str | None = option(None, place=True, resume="must match")
    """Adapters on --pretrain to train on, a PEFT folder, whose rank, alpha and target modules count."""

    def __post_init__(self) -> None:
        # Rank, alpha and targets of the adapters are shown, saved and compared on resume.
        for name, value in _numbers_of(_adapter_config(self.lora_path)).items():
            if vars(self)[name] == vars(type(self))[name]:
                object.__setattr__(self, name, value)

    def problems(self) -> Iterator[str]:
        if self.lora_path is not None:
            yield from self._problems_of_adapters(self.lora_path)
        if not self.target_modules:
            yield "--target_modules needs at least one name, or 'all-linear'."
        if self.load_in_4bit and self.lora_rank == 0:
            yield "--load_in_4bit keeps the weights frozen: give --lora_rank, so that there is something to train."

    def _problems_of_adapters(self, folder: str) -> Iterator[str]:
        """Yield messages about ``--lora_path``, and options that its adapters decide."""
        described = _adapter_config(folder)
        if described is None:  # said where models are checked, since folders are read there
            return
        kind = described.get("peft_type")
        if kind != "LORA":
            yield f"--lora_path {folder}: its adapters are of type {kind}; only LoRA adapters can be trained on."
        names = [name for name in _UNKNOWN_PARTS if described.get(name)]
        if described.get("bias", "none") != "none":
            names.append("bias")
        start = str(described.get("init_lora_weights"))
        if start.startswith(_CHANGE_THE_BASE):
            names.append(f"init_lora_weights {start}")
        names += sorted(set(described.get("modules_to_save") or ()) - {"classifier", "score"})
        if names:
            yield (
                f"--lora_path {folder}: its adapters have {', '.join(names)}, which are not trained here. Merge them "
                "with openppo.cli.merge_lora, and give the result as --pretrain with --lora_rank."
            )
        for name, value in _numbers_of(described).items():
            chosen = vars(self)[name]
            is_other = set(chosen) != set(value) if name == "target_modules" else chosen != value
            if is_other:
                yield f"--{name} {_words(chosen)}: the adapters of --lora_path have {_words(value)}. Leave it out."


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
    described = _adapter_config(name)
    return None if described is None else described.get("base_model_name_or_path")


def _adapter_config(folder: str | None) -> dict[str, Any] | None:
    """Contents of a PEFT folder's ``adapter_config.json``; None for other folders."""
    if folder is None:
        return None
    try:
        described = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return described if isinstance(described, dict) else None


def _numbers_of(described: dict[str, Any] | None) -> dict[str, Any]:
    """Options of ``LoRAConfig`` that adapters have decided, by name."""
    if described is None:
        return {}
    targets = described.get("target_modules") or ()
    targets = (targets,) if isinstance(targets, str) else tuple(sorted(targets))
    numbers = {"lora_rank": described.get("r"), "lora_alpha": described.get("lora_alpha")}
    decided = {name: number for name, number in numbers.items() if isinstance(number, int)}
    return decided | ({"target_modules": targets} if targets else {})


def _words(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
