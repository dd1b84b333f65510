"""Adapters that are trained on a frozen model, and the model without them as reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from openppo.config import LoRAConfig
from openppo.models.lora.folder import is_peft_folder, quiet_peft
from openppo.models.lora.tied import refuse_tied

Task = Literal["CAUSAL_LM", "SEQ_CLS"]


def add_adapters(model: PreTrainedModel, lora: LoRAConfig, task: Task) -> nn.Module:
    """``model`` as PEFT model: trainable adapters on ``lora.target_modules``, the head of SEQ_CLS trained whole.

    All else is frozen; adapters have the dtype of the model. Dropout is active in training mode only, so with
    ``lora_dropout`` above 0 log-probs of the training pass differ from old ones taken in evaluation mode, and the
    policy ratio from 1 before any update. ``ValueError`` when nothing is called like a target.
    """
    from peft import LoraConfig, get_peft_model  # heavy, and needed with LoRA only

    layers: list[Any] = list(model.modules())
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # On some CPUs bitsandbytes repacks 4-bit weights at the first forward in evaluation mode, for a kernel that
            # has no gradient: silently wrong gradients from then on.
            layer.support_avx512bf16_for_cpu = False
    given: str | Sequence[str] = lora.target_modules
    targets = [given] if isinstance(given, str) else list(given)
    config = LoraConfig(
        task_type=task,  # with SEQ_CLS peft finds the head by itself: no adapter on it, and it is saved beside them
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules="all-linear" if "all-linear" in targets else targets,
    )
    try:
        with quiet_peft():
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)  # DeepSpeed keeps float32 masters
        refuse_tied(adapted)
    except ValueError as error:
        raise ValueError(f"--target_modules {' '.join(targets)}: {error}") from error
    base = Path(model.name_or_path or "")
    if base.is_dir():  # so that the saved folder finds it from everywhere
        config.base_model_name_or_path = str(base.resolve())
    return adapted


def refuse_stacked_adapters(name: str) -> None:
    """``ValueError`` if ``name`` is a PEFT folder: adapters trained on it could not be loaded by plain peft."""
    if is_peft_folder(name):
        raise ValueError(
            f"{name} is a PEFT folder, and --lora_rank needs full weights to put adapters on. Merge it first: python "
            f"-m openppo.cli.merge_lora --lora_path {name} --save_path {name.rstrip('/')}_merged"
        )


class _Engine(Protocol):
    """A module to be called, possibly wrapped; ``TrainableModel`` is one."""

    @property
    def module(self) -> nn.Module: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class AdapterOffReference:
    """The model that ``engine`` trains with its adapters off, without gradients: a reference that takes no memory.

    Called like the engine; under ZeRO-3 by all ranks together. The adapters run with a scale of 0, which adds exactly
    nothing. Switching them off would save little, toggle ``requires_grad``, and change the order of modules that ZeRO-3
    has learned to prefetch, twice for every batch.
    """

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the engine would return without adapters."""
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self.engine.module, 0.0):
            return self.engine(*args, **kwargs)
