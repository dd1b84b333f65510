"""LoRA adapters: training on a frozen model, the reference without them, and merging."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from openppo import logger
from openppo.config import LoRAConfig
from openppo.models.pretrained import UntrustedModelError, forbid_remote_code, is_peft_folder
from openppo.models.saved_adapters import (
    HEAD_TASK,
    TaskType,
    load_adapters,
    require_folder,
    saved_config,
    whole_weights,
)
from openppo.models.vision_models import CONNECTORS, TOWERS, placeholders


def lora_options(model: object, **fields: Any) -> LoRAConfig:
    """Check ``fields`` of ``LoRAConfig`` for a model or its name.

    ``target_modules`` may be one name or any sequence of names. ``ValueError`` for adapters on a PEFT folder, since
    plain peft could not load them.
    """
    targets = fields.get("target_modules", LoRAConfig.target_modules)
    if isinstance(targets, str):
        targets = (targets,)
    options = LoRAConfig(**fields | {"target_modules": tuple(targets)})
    if options.lora_path is not None:
        require_folder(options.lora_path)
    options.validate()
    if options.lora_rank > 0 and isinstance(model, str) and is_peft_folder(model):
        raise ValueError(
            f"{model} is a PEFT folder, and --lora_rank needs full weights to put adapters on. Merge it first: python "
            f"-m openppo.cli.merge_lora --lora_path {model} --save_path {model.rstrip('/')}_merged. To train on its "
            f"adapters, give its base model as --pretrain, and --lora_path {model}."
        )
    return options


def add_adapters(model: PreTrainedModel, lora: LoRAConfig, task: TaskType) -> nn.Module:
    """Make ``model`` a PEFT model with trainable adapters on ``lora.target_modules``.

    The head of SEQ_CLS is trained in full, and everything else is frozen; adapters have the dtype of the model. A
    ``lora_dropout`` above 0 is active in training mode, so the policy ratio differs from 1 before any update. With
    ``lora_path`` they are the adapters of that folder. ``ValueError`` if no module has the name of a target, or the
    folder's adapters do not fit.
    """
    from peft import get_peft_model  # a heavy import, for LoRA only

    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            # On some CPUs bitsandbytes repacks 4-bit weights at the first forward in evaluation mode, for a kernel that
            # has no gradient: from then on gradients are silently wrong.
            vars(layer)["support_avx512bf16_for_cpu"] = False

    config = _new_config(model, lora, task)
    if lora.lora_path is not None:
        config = saved_config(lora.lora_path, task, lora.lora_dropout)
    try:
        # DeepSpeed keeps float32 masters, so adapters need no float32 of their own.
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        refuse_tied(adapted)
    except ValueError as error:
        raise ValueError(f"--target_modules {' '.join(lora.target_modules)}: {error}") from error

    base = Path(model.name_or_path or "")
    if base.is_dir():
        # An absolute path, so that the saved folder finds its base model from any working directory.
        config.base_model_name_or_path = str(base.resolve())
    if lora.lora_path is not None:
        load_adapters(adapted, lora.lora_path)
    return adapted


def _new_config(model: PreTrainedModel, lora: LoRAConfig, task: TaskType) -> Any:
    """PEFT's config of new adapters; those of a model that reads images are on its language model alone."""
    from peft import LoraConfig

    targets: str | list[str] = list(lora.target_modules)
    if "all-linear" in lora.target_modules:
        targets = "all-linear"
    vision_modules = None
    if placeholders(model.config):
        names = "|".join(sorted(TOWERS | CONNECTORS))
        vision_modules = rf"(.*\.)?({names})(\..*)?"
    return LoraConfig(
        # With SEQ_CLS peft finds the head by itself: the head gets no adapter, and is saved with the adapters.
        task_type=task,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        exclude_modules=vision_modules,
    )


def refuse_tied(adapted: nn.Module) -> None:
    """``ValueError`` for a PEFT model with an adapter on a weight that two layers share."""
    names: dict[int, list[str]] = {}
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)

    for shared in names.values():
        if len(shared) > 1 and any(".base_layer." in name for name in shared):
            raise ValueError(
                f"there is an adapter on a weight that is {' and '.join(shared)}: merged, it would change both. "
                "Leave that layer out."
            )


class AdapterOffReference:
    """The trained model with its adapters off, without gradients: a reference that takes no memory.

    ``model.module`` is the PEFT model; under ZeRO-3 all ranks call together. Adapters run with a scale of 0, which adds
    exactly 0. Switching them off would, twice for every batch, toggle ``requires_grad`` and change the order in which
    ZeRO-3 has learned to prefetch modules.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.module = model.module

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model without adapters."""
        from peft.helpers import rescale_adapter_scale

        with rescale_adapter_scale(self.module, 0.0):
            return self.model(*args, **kwargs)


def merge_adapters(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """Merge the adapters of ``folder`` into the weights of ``model``; load the head saved there.

    Adapters of a causal language model may be merged into a critic, which has the same layers. ``ValueError`` for
    adapters that do not fit, are incomplete or broken, or are of another kind than LoRA.
    """
    from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"{folder}: its adapters are of type {config.peft_type}; only LoRA adapters can be merged."
        )
    is_classifier = hasattr(model, "score")
    if config.task_type == HEAD_TASK and not is_classifier:
        raise ValueError(
            f"{folder} holds the adapters of a reward model or critic; give those of a language model."
        )
    if config.megatron_config is not None:  # names a module that some releases of peft import
        raise ValueError(f"{folder}: its adapters name code of Megatron, which is not run here.")
    config.task_type = None
    config.inference_mode = True

    try:
        with forbid_remote_code(folder):
            weights = load_peft_weights(folder, device="cpu")
        _refuse_resized(model, weights)
        adapted = PeftModel(model, config)
        refuse_tied(adapted)

        result: Any = set_peft_model_state_dict(adapted, _without_copies(weights))
        misfits = [key for key in result.missing_keys if ".lora_" in key]
        for key in result.unexpected_keys:
            if not (is_classifier and ".lm_head." in key):
                misfits.append(key)
        if misfits:
            raise ValueError(f"weights are missing or have no place, such as {misfits[0]}")

        for layer in adapted.modules():
            if isinstance(layer, BaseTunerLayer):
                with whole_weights([*layer.get_base_layer().parameters()]):
                    layer.merge(safe_merge=True)
        merged: Any = adapted.unload()
    except UntrustedModelError:
        raise
    except (ValueError, KeyError, RuntimeError, OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]  # torch's messages are tables
        raise ValueError(
            f"{folder}: its adapters cannot be merged into {model.name_or_path}: {reason}"
        ) from error
    logger.info("%s: adapters merged into %s", folder, model.name_or_path)
    return merged.requires_grad_(True)  # peft had frozen it


def _without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the copies of fully trained modules.

    If embeddings were resized, peft writes these modules a second time, under inner names.
    """
    kept = {}
    for name, tensor in weights.items():
        if ".modules_to_save." not in name and ".original_module." not in name:
            kept[name] = tensor
    return kept


def _refuse_resized(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """``ValueError`` for adapters that were saved with more or fewer embeddings than ``model`` has."""
    n_embeddings = model.get_input_embeddings().num_embeddings
    layers = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    names = [name for name, layer in model.named_modules() if id(layer) in layers]
    prefixes = tuple(f"base_model.model.{name}." for name in names)

    for name, tensor in weights.items():
        if not name.startswith(prefixes) or ".lora_" in name:
            continue
        n = len(tensor)
        if n != n_embeddings:
            raise ValueError(
                f"they are for {n} embeddings, and it has {n_embeddings}. Resize it with resize_token_embeddings({n}), "
                "save it, and name that folder: base_model_name_or_path in adapter_config.json, or merge_lora "
                "--pretrain."
            )
