"""From a local folder or hub name to a Hugging Face model: dtype, attention, LoRA, clear errors."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("openppo")

_HUB_TIMEOUT_SECONDS = 10


def check_model(name: str, flag: str) -> PreTrainedConfig:
    """The config of ``name``, read before any weight is: ``ValueError`` naming ``flag`` when there is no such model."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{flag} {name}: this folder has no config.json, so it is not a Hugging Face model.")
    elif path.is_file():
        raise ValueError(f"{flag} {name}: this is a file; give the folder that holds config.json and the weights.")
    else:
        _check_on_hub(name, flag)
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{flag} {name}: its config cannot be read: {error}") from error


def _check_on_hub(name: str, flag: str) -> None:
    """Fail at once where transformers would retry for half a minute; what the hub says is left to transformers."""
    nowhere = f"{flag} {name}: no such local folder, and "
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(nowhere + "this is not a hub name of the form owner/model. Check the path.")
    try:
        if try_to_load_from_cache(name, "config.json") is not None:
            return
    except HFValidationError as error:
        raise ValueError(nowhere + "this is not a hub name of the form owner/model. Check the path.") from error
    if HF_HUB_OFFLINE:
        raise ValueError(nowhere + "HF_HUB_OFFLINE is set and the model is not in the local cache.")
    try:
        urlopen(ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS).close()
    except HTTPError:
        return  # it answered
    except OSError as error:
        raise ValueError(nowhere + f"the hub cannot be reached ({error}). Check the path.") from error


def attention_implementation(flash_attn: bool) -> str | None:
    """Name for ``attn_implementation``: None lets transformers take SDPA wherever the model has it."""
    if not flash_attn:
        return None
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--flash_attn needs the package flash-attn, which is not installed: "
            "pip install flash-attn --no-build-isolation, or leave the flag away to use PyTorch's SDPA."
        )
    return "flash_attention_2"


def load_options(bf16: bool, flash_attn: bool) -> dict[str, Any]:
    """Keyword arguments for ``from_pretrained``: dtype and attention. Dropout is handled by ``disable_dropout``."""
    options: dict[str, Any] = {"dtype": torch.bfloat16 if bf16 else torch.float32}
    attention = attention_implementation(flash_attn)
    if attention is not None:
        options["attn_implementation"] = attention
    return options


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, modules and plain attributes alike.

    A policy with dropout would have ratios other than 1 before its first update.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def apply_lora(
    model: PreTrainedModel, rank: int, alpha: int, dropout: float, target_modules: str | Sequence[str]
) -> nn.Module:
    """``model`` with trainable LoRA adapters of ``rank`` on ``target_modules``; all else is frozen."""
    from peft import LoraConfig, get_peft_model  # heavy, and needed with LoRA only

    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules))


def load_tokenizer(name: str, flag: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. A missing PAD token is left missing: masks never depend on it."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{flag} {name}: its tokenizer cannot be loaded: {error}") from error


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill padded places with: PAD, else EOS, else 0. Nothing is ever inferred from it."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Every id that ends a response: those of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    sources = [model.generation_config.eos_token_id, model.config.eos_token_id]
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        found.update([source] if isinstance(source, int) else source or [])
    return sorted(found)
