"""Adapters of a PEFT folder that are trained on: their config, shapes and weights."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled

from openppo import logger
from openppo.models.pretrained import forbid_remote_code, is_peft_folder

TaskType = Literal["CAUSAL_LM", "SEQ_CLS"]
HEAD_TASK = "SEQ_CLS"
_KINDS = {"CAUSAL_LM": "a language model", "SEQ_CLS": "a reward model or critic"}
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
Shapes = Mapping[str, tuple[int, ...]]


def require_folder(folder: str) -> None:
    """``ValueError`` unless ``folder`` holds adapters."""
    if not is_peft_folder(folder):
        raise ValueError(
            f"--lora_path {folder}: no adapter_config.json is there. Name a PEFT folder, as training with --lora_rank "
            "saves it."
        )


def saved_config(folder: str, task: TaskType, dropout: float = 0.0) -> Any:
    """PEFT's config of the adapters in ``folder``, to train with ``dropout``; ``ValueError`` if of another task."""
    require_folder(folder)
    from peft import LoraConfig, PeftConfig  # a heavy import, for LoRA only

    config = PeftConfig.from_pretrained(folder)
    assert isinstance(config, LoraConfig), f"{folder}: checked by LoRAConfig"
    if config.task_type not in (task, None):
        kind = _KINDS.get(str(config.task_type), f"the task {config.task_type}")
        raise ValueError(
            f"--lora_path {folder}: its adapters are of {kind}, and here {_KINDS[task]} is trained. Merge them with "
            "openppo.cli.merge_lora, and give the result as --pretrain."
        )
    config.task_type = task
    config.inference_mode = False
    config.lora_dropout = dropout
    config.init_lora_weights = True  # of tensors that are replaced at once
    return config


def load_adapters(adapted: Any, folder: str) -> None:
    """Load the adapters of ``folder``, and a head saved there, into a PEFT model; ``ValueError`` if they do not fit."""
    weights = _weights(folder)
    parameters = adapter_parameters(adapted)
    needed = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_shapes(needed, shapes, f"--lora_path {folder} does not fit the model")

    with torch.no_grad():
        for name, parameter in parameters.items():
            with whole_weights([parameter] if hasattr(parameter, "ds_id") else []):
                parameter.copy_(weights[name])
    logger.info("--lora_path %s: its adapters are trained on", folder)


def adapter_parameters(adapted: Any) -> dict[str, Any]:
    """Parameters of adapters, and of a head that is trained whole, by their names in a PEFT folder."""
    from peft import get_peft_model_state_dict

    tensors = adapted.state_dict(keep_vars=True)
    return dict(get_peft_model_state_dict(adapted, tensors, save_embedding_layers=False))


def saved_shapes(folder: str) -> Shapes:
    """Shapes of the tensors of a PEFT folder, by name."""
    return {name: tuple(tensor.shape) for name, tensor in _weights(folder).items()}


def _weights(folder: str) -> dict[str, Tensor]:
    """Tensors of a PEFT folder, by name; ``ValueError`` if they cannot be read."""
    from peft import load_peft_weights

    if not any(Path(folder, name).is_file() for name in _FILES):
        raise ValueError(f"--lora_path {folder}: {_FILES[0]} is missing. Copy it there.")
    try:
        with forbid_remote_code(folder):
            weights: dict[str, Tensor] = load_peft_weights(folder, device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--lora_path {folder}: its weights cannot be read ({error}). Check the folder."
        ) from error
    return weights


def check_shapes(needed: Shapes, saved: Shapes, start: str) -> None:
    """``ValueError`` beginning with ``start`` unless both have the same names and shapes."""
    for name in sorted({*needed, *saved}):
        if needed.get(name) == saved.get(name):
            continue
        here = needed.get(name, "none")
        there = saved.get(name, "none")
        raise ValueError(
            f"{start}: {name} has the shape {here} in the model and {there} in the folder. Give the base model that "
            "the adapters were trained on."
        )


def whole_weights(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
    """Gather ``parameters`` for the context if ZeRO-3 loads in partitions; rank 0's changes to them are kept."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    from peft.utils.integrations import gather_params_ctx

    return gather_params_ctx(parameters)
