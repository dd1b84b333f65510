"""Load a Hugging Face model from a folder or the hub: dtype, attention, 4 bits, PEFT folders."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import deepspeed as zero3

from openppo import logger
from openppo.models.adapters import merge_adapters
from openppo.models.attention import use_fast_attention
from openppo.models.pretrained import (
    base_model_of,
    forbid_remote_code,
    is_peft_folder,
    language_model_class,
    load_config,
)
from openppo.models.vision_models import placeholders, vision_part


def attention_implementation(flash_attn: bool, bf16: bool) -> str | None:
    """Name for ``attn_implementation``; None for transformers' choice: SDPA if the model has it."""
    if not flash_attn:
        return None
    if not bf16:
        raise ValueError("--flash_attn needs --bf16: FlashAttention-2 does not compute in float32.")
    _require("flash_attn", "--flash_attn", "pip install flash-attn --no-build-isolation")
    return "flash_attention_2"


def _require(module: str, flag: str, remedy: str) -> None:
    """``ValueError`` naming ``flag`` if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{flag} needs the package {module}, which is not installed: {remedy}, or omit the flag."
        )


def load_options(
    bf16: bool, flash_attn: bool, load_in_4bit: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Keyword arguments for ``from_pretrained``; 4 bits are NF4 with quantized scales (arXiv 2305.14314)."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    attention = attention_implementation(flash_attn, bf16)
    if attention is not None:
        options["attn_implementation"] = attention
    if load_in_4bit:
        _require("bitsandbytes", "--load_in_4bit", "pip install bitsandbytes")
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=["lm_head", "score"],
        )
    return options


def load_causal_lm(name: str, base: str | None = None, **load: Any) -> PreTrainedModel:
    """Load a causal language model, with adapters merged if ``name`` is a PEFT folder.

    ``base`` replaces the base model that a PEFT folder names; ``load`` are keywords for ``from_pretrained``.
    ``ValueError`` for a checkpoint without all weights or with code in it, and as in ``merge_adapters``.
    """
    config = load_config(name, base, trust_remote_code=load["trust_remote_code"])

    def check(_: PreTrainedModel, report: dict[str, Any]) -> None:
        missing = sorted(report["missing_keys"])[:5]
        if missing:
            raise ValueError(
                f"{name} is not a whole causal language model: it lacks {', '.join(missing)}, which would be random. "
                "Give a checkpoint that has them."
            )

    with forbid_remote_code(name):
        kind = language_model_class(config)
        model, _ = load_weights(kind, check, base or base_model_of(name), config=config, **load)
    use_fast_attention(model)
    if is_peft_folder(name):
        return merge_adapters(model, name)
    return model


def load_weights(
    kind: Any, check: Callable[[PreTrainedModel, dict[str, Any]], None], source: str, **load: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return model and report of ``from_pretrained``, once ``check`` has accepted them; partitioned under ZeRO-3.

    Under ZeRO-3 transformers compares shapes on rank 0 alone, so ``check`` gets a model without weights. Only under
    ZeRO-3 do constructors of CLIP's towers draw from the global generator, so its state is restored.
    """
    reads_images = bool(placeholders(load["config"]))
    with torch.random.fork_rng(devices=[], enabled=reads_images):
        return _load_weights(kind, check, source, **load)


def _load_weights(
    kind: Any, check: Callable[[PreTrainedModel, dict[str, Any]], None], source: str, **load: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    load["output_loading_info"] = True
    if not zero3.is_deepspeed_zero3_enabled() or "quantization_config" in load:
        model, report = kind.from_pretrained(source, **load)
        check(model, report)
        return model, report

    partitions = zero3._hf_deepspeed_config_weak_ref
    zero3.unset_hf_deepspeed_config()
    try:
        model, report = kind.from_pretrained(source, device_map="meta", **load)
    finally:
        zero3._hf_deepspeed_config_weak_ref = partitions
    check(model, report)
    partitioned, _ = kind.from_pretrained(source, **load)
    return partitioned, report


@contextmanager
def model_error_context(flag: str, name: str, role: str = "") -> Iterator[None]:
    """Log the loading of a model; turn its errors into a ``ValueError`` that starts with the flag."""
    logger.info("loading %s %s%s", flag, name, f" for the {role}" if role else "")
    try:
        yield
    except ValueError as error:
        is_named = str(error).startswith(name)
        raise ValueError(f"{flag} {error}" if is_named else f"{flag} {name}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{flag} {name}: its weights cannot be read ({error}). Check the folder."
        ) from error


def freeze_vision(model: nn.Module, tower: bool, connector: bool) -> None:
    """Freeze the vision tower of a model, or its connector to embeddings, or both."""
    is_frozen = {"tower": tower, "connector": connector}
    n_frozen = 0
    for name, parameter in model.named_parameters():
        if is_frozen.get(vision_part(name) or ""):
            parameter.requires_grad_(False)
            n_frozen += 1
    if n_frozen > 0:
        logger.info("%d tensors of the model that read images are frozen", n_frozen)
