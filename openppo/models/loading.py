"""From a local folder or hub name to a Hugging Face model: dtype, attention, 4 bits, PEFT folders, clear errors."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from openppo.models.attention.cpu import use_cpu_attention
from openppo.models.attention.cuda import use_cuda_attention
from openppo.models.lora.folder import base_model_of, is_peft_folder, merge_adapters
from openppo.models.trust import RefusedError, refusing_code

logger = logging.getLogger("openppo")

_HUB_TIMEOUT_SECONDS = 10
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "*.tiktoken")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
"""Of positions that there are; not ``seq_length``, which of BLOOM is what it was trained on."""


def check_model(name: str, flag: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of ``name``, read before any weight is: ``ValueError`` naming ``flag`` when there is no such model.

    Of a PEFT folder the base model is checked too.
    """
    if is_peft_folder(name):
        try:
            check_model(base_model_of(name), f"{flag} {name}: its base model", trust_remote_code)
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(flag) else f"{flag} {error}") from error
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"{flag} {name}: this folder has no config.json, so it is not a Hugging Face model.")
    elif Path(name).is_file():
        raise ValueError(f"{flag} {name}: this is a file; give the folder that holds config.json and the weights.")
    else:
        _check_on_hub(name, flag)
    try:
        return load_config(name, trust_remote_code=trust_remote_code)
    except RefusedError as error:
        raise ValueError(f"{flag} {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{flag} {name}: its config cannot be read: {error}") from error


def load_config(
    name: str, base: str | None = None, *, trust_remote_code: bool = False, **changes: Any
) -> PreTrainedConfig:
    """The config of a model with ``changes``; of a PEFT folder its model_config.json, else that of its ``base``."""
    own = Path(name) / "model_config.json"
    source = own if is_peft_folder(name) and own.is_file() else base or base_model_of(name)
    with refusing_code(name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **changes)
    return config


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


def attention_implementation(flash_attn: bool, bf16: bool) -> str | None:
    """Name for ``attn_implementation``: None lets transformers take SDPA wherever the model has it."""
    if not flash_attn:
        return None
    if not bf16:
        raise ValueError("--flash_attn needs --bf16: FlashAttention-2 does not compute in float32.")
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "--flash_attn needs the package flash-attn, which is not installed: "
            "pip install flash-attn --no-build-isolation, or leave the flag away to use PyTorch's SDPA."
        )
    return "flash_attention_2"


def quantization(load_in_4bit: bool, bf16: bool) -> BitsAndBytesConfig | None:
    """How weights but for heads are kept in 4 bits (NF4, quantized scales, arXiv 2305.14314); None without them.

    ``ValueError`` if bitsandbytes is not installed.
    """
    if not load_in_4bit:
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "--load_in_4bit needs the package bitsandbytes, which is not installed: pip install bitsandbytes, or leave "
            "the flag away."
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if bf16 else torch.float32,
        llm_int8_skip_modules=["lm_head", "score"],
    )


def load_options(
    bf16: bool, flash_attn: bool, load_in_4bit: bool = False, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Keyword arguments for ``from_pretrained``: dtype, attention, 4 bits, code. Dropout: see ``disable_dropout``."""
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if bf16 else torch.float32,
        "attn_implementation": attention_implementation(flash_attn, bf16),
        "quantization_config": quantization(load_in_4bit, bf16),
        "trust_remote_code": trust_remote_code,
    }
    return {name: value for name, value in options.items() if value is not None}


def load_causal_lm(name: str, base: str | None = None, **options: bool) -> PreTrainedModel:
    """A causal language model, with adapters merged if ``name`` is a PEFT folder.

    ``base`` replaces the base model that a PEFT folder names; ``options`` are those of ``load_options``.
    ``ValueError`` for a checkpoint without all weights or with code in it, and as in ``merge_adapters``.
    """
    load = load_options(**options)
    config = load_config(name, base, trust_remote_code=load["trust_remote_code"])
    with refusing_code(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base or base_model_of(name), config=config, output_loading_info=True, **load
        )
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{name} is no whole causal language model: it lacks {', '.join(missing[:5])}, which would be random. "
            "Give a checkpoint that has them."
        )
    use_cpu_attention(model)
    use_cuda_attention(model)
    return merge_adapters(model, name) if is_peft_folder(name) else model


def disable_dropout(model: nn.Module) -> None:
    """Switch off dropout, layerdrop and router noise.

    A policy with it would have ratios other than 1 before its first update. It may be a module or a plain attribute.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if getattr(module, "router_jitter_noise", 0) > 0:
            # Phi-MoE draws among the experts within that margin, which it has in evaluation mode too: it stays there.
            module.eval()
            vars(module)["train"] = partial(_same, module)
        for name, value in vars(module).items():
            if isinstance(value, float) and name != "router_jitter_noise" and _is_random(name):
                setattr(module, name, 0.0)


def _is_random(attribute: str) -> bool:
    return any(word in attribute for word in ("dropout", "pdrop", "layerdrop", "jitter"))


def _same(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of a module's ``train``: its mode does not change."""
    return module


def load_tokenizer(
    name: str,
    flag: str,
    base: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; of a PEFT folder the one that lies there, else that of its ``base``.

    A missing PAD token is left missing: masks never depend on it. ``ValueError`` names ``flag``. Whenever the chat
    template is applied it gets ``template_kwargs``, those of ``--chat_template_kwargs``.
    """
    has_tokenizer = (Path(name) / "tokenizer_config.json").is_file()
    try:
        with refusing_code(name):
            source = name if has_tokenizer else base or base_model_of(name)
            _check_tokenizer_files(Path(source))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except RefusedError as error:
        raise RefusedError(f"{flag} {error}") from error
    except (OSError, ValueError, KeyError) as error:
        says = " ".join(str(error).split())
        raise ValueError(f"{flag} {name}: its tokenizer cannot be loaded: {says}") from error
    if template_kwargs:
        _check_template_kwargs(tokenizer, f"{flag} {name}", template_kwargs)
        vars(tokenizer)["apply_chat_template"] = partial(tokenizer.apply_chat_template, **template_kwargs)
    return tokenizer


def _check_tokenizer_files(folder: Path) -> None:
    """Refuse a folder without tokenizer files: transformers would invent a tokenizer."""
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ValueError(
            "the folder has no tokenizer files, such as tokenizer.json. Copy those of the model that it was made from."
        )


def _check_template_kwargs(tokenizer: PreTrainedTokenizerBase, model: str, template_kwargs: Mapping[str, Any]) -> None:
    """Refuse reserved arguments, and those the chat template does not use."""
    taken = {"messages", *signature(tokenizer.apply_chat_template).parameters} - {"tools", "documents"}
    templates = str(tokenizer.chat_template or "")
    for argument in template_kwargs:
        if argument in taken:
            raise ValueError(f"--chat_template_kwargs: {argument!r} is no argument of chat templates. Leave it out.")
        if templates and not re.search(rf"\b{re.escape(argument)}\b", templates):
            raise ValueError(
                f"--chat_template_kwargs: the chat template of {model} does not use {argument!r}. Correct the name, or "
                "leave it out."
            )


def context_length(config: PreTrainedConfig) -> int | None:
    """The most tokens that a model reads, by its config; None where that says nothing, as of some models.

    Positions that are rescaled for longer rows end before that: see ``rescaled_positions``.
    """
    text = config.get_text_config()
    lengths = (getattr(text, name, None) for name in _CONTEXT_NAMES)
    longest = next((length for length in lengths if length is not None and length > 0), None)
    return min((rope["original_max_position_embeddings"] for rope in _rescaled(text)), default=longest)


def rescaled_positions(config: PreTrainedConfig) -> str:
    """Reason for a shortened ``context_length``, as a sentence; else empty."""
    names = [rope["rope_type"] for rope in _rescaled(config.get_text_config())]
    return f" Beyond it, {names[0]} positions make log-probs depend on what else is in a batch." if names else ""


def _rescaled(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rope parameters of positions rescaled by a batch's longest row."""
    found = getattr(text, "rope_parameters", None) or {}
    every = [found, *(value for value in found.values() if isinstance(value, dict))]
    kinds = [rope for rope in every if rope.get("rope_type") in ("longrope", "dynamic")]
    return [rope for rope in kinds if rope.get("original_max_position_embeddings") is not None]


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill padded places with: PAD, else EOS, else 0. Nothing is ever inferred from it."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def check_token_ids(
    config: PreTrainedConfig, model: str, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int]]
) -> None:
    """Refuse token ids of ``rows``, or PAD, without an embedding.

    ``model`` is a flag and a name. A tokenizer may know more tokens than a model (Gemma 3) as long as none occurs.
    """
    n_embeddings = config.get_text_config().vocab_size
    largest = max((max(row, default=0) for row in rows), default=0)
    largest = max(largest, pad_token_id(tokenizer))
    if largest >= n_embeddings:
        raise ValueError(
            f"{model}: token {tokenizer.convert_ids_to_tokens(largest)!r} has the id {largest}, and the model has "
            f"embeddings of {n_embeddings} ids; its tokenizer knows {len(tokenizer)} tokens. Give the model as many "
            f"with resize_token_embeddings, or leave that token out."
        )


def known_eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """``eos_token_ids`` that the model can sample; a warning names the others."""
    found, n_embeddings = eos_token_ids(model, tokenizer), model.config.get_text_config().vocab_size
    outside = [token_id for token_id in found if token_id >= n_embeddings]
    if outside:
        logger.warning(
            "EOS ids outside the model's vocabulary of %d tokens: %s. No response can end with them; correct "
            "eos_token_id in config.json, generation_config.json or the tokenizer.",
            n_embeddings,
            ", ".join(map(str, outside)),
        )
    return [token_id for token_id in found if token_id < n_embeddings]


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Every id that ends a response: those of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    configs = model.generation_config, model.config, model.config.get_text_config()
    sources = [getattr(part, "eos_token_id", None) for part in configs]  # of images and text it may be in one only
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    for source in sources:
        found.update([source] if isinstance(source, int) else source or [])
    return sorted(found)
