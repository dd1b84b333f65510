"""PEFT folders: adapters beside the name of their base model, merged into it wherever a model is loaded."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from openppo.models.lora.tied import refuse_tied
from openppo.models.trust import RefusedError, refusing_code

logger = logging.getLogger("openppo")

_CONFIG = "adapter_config.json"
HEAD_TASK = "SEQ_CLS"


def is_peft_folder(name: str) -> bool:
    """Whether ``name`` is a local folder of adapters."""
    return (Path(name) / _CONFIG).is_file()


def task_of(folder: str) -> str | None:
    """What the adapters were trained for, CAUSAL_LM or SEQ_CLS (None: not said). Errors as in ``base_model_of``."""
    task: str | None = _read_config(folder).get("task_type")
    return task


def base_model_of(name: str) -> str:
    """The base model that a PEFT folder names, ``name`` itself if it is none.

    Raises ``ValueError`` when ``adapter_config.json`` cannot be read, or names no base model or another PEFT folder.
    """
    if not is_peft_folder(name):
        return name
    base = _read_config(name).get("base_model_name_or_path")
    if not isinstance(base, str) or base == "":
        raise ValueError(f"{name}: its {_CONFIG} names no base model; write one there as base_model_name_or_path.")
    if is_peft_folder(base):
        raise ValueError(
            f"{name}: its base model {base} is a PEFT folder too. Merge that one with openppo.cli.merge_lora and write "
            f"the result's name as base_model_name_or_path into this folder's {_CONFIG}."
        )
    return base


def merge_adapters(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """``model`` with the adapters of ``folder`` merged into its weights, and with the head that is saved there, if any.

    Adapters of a causal language model may be merged into a critic: it has the same layers. Raises ``ValueError`` when
    they do not fit, are incomplete or broken, or are no LoRA adapters.
    """
    from peft import LoraConfig, PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder}: its adapters are of type {config.peft_type}; only LoRA adapters can be merged.")
    if config.task_type == HEAD_TASK and not _is_classifier(model):
        raise ValueError(f"{folder} holds the adapters of a reward model or critic; give those of a language model.")
    if config.megatron_config is not None:  # names a module that some releases of peft import
        raise ValueError(f"{folder}: its adapters name code of Megatron, which is not run here.")
    config.task_type = None
    config.inference_mode = True
    try:
        with quiet_peft():
            adapted = PeftModel(model, config)
        refuse_tied(adapted)
        with refusing_code(folder):
            weights = load_peft_weights(folder, device="cpu")
        result: Any = set_peft_model_state_dict(adapted, weights)
        missing = [key for key in result.missing_keys if ".lora_" in key]
        homeless = [key for key in result.unexpected_keys if not (_is_classifier(model) and ".lm_head." in key)]
        if missing or homeless:
            raise ValueError(f"weights are missing or have no place, such as {(missing + homeless)[0]}")
        merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except RefusedError:
        raise
    except (ValueError, KeyError, RuntimeError, OSError, SafetensorError) as error:
        says = " ".join(str(error).split())  # torch's is a table
        raise ValueError(f"{folder}: its adapters cannot be merged into {model.name_or_path}: {says[:300]}") from error
    logger.info("%s: adapters merged into %s", folder, model.name_or_path)
    return merged.requires_grad_(True)  # peft had frozen it


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without what peft and transformers say of each other's ways."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out", category=UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def has_head(folder: str) -> bool:
    """Whether a scalar head is saved with the adapters of ``folder``."""
    from peft import load_peft_weights

    return any(key.endswith(".score.weight") for key in load_peft_weights(folder, device="cpu"))


def _is_classifier(model: PreTrainedModel) -> bool:
    return hasattr(model, "score")


def _read_config(folder: str) -> dict:
    try:
        config: dict = json.loads((Path(folder) / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: its {_CONFIG} cannot be read: {error}") from error
    return config
