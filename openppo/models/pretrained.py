"""Configs and tokenizers of pretrained models, read before any weight; code of their own is refused."""

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from jinja2 import TemplateSyntaxError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from openppo.models.sampled_ids import SampledIds
from openppo.models.template_limits import require_bounded
from openppo.models.vision_models import placeholders
from openppo.user_code import TEMPLATE_ERRORS

_ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "*.tiktoken")
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
)
"""Numbers of positions; not ``seq_length``, which of BLOOM is what it was trained on."""


class UntrustedModelError(ValueError):
    """A model or tokenizer that would run code of its own."""


@contextmanager
def forbid_remote_code(name: str) -> Iterator[None]:
    """Context of each ``from_pretrained``: ``UntrustedModelError`` for code, or pickles beyond tensors, in ``name``."""
    try:
        yield
    except (
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
    ) as error:  # of weights_only, so nothing has run
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise  # not about a file
        raise UntrustedModelError(
            f"{name}: its weights are a pickle file that holds more than tensors, which could run code, or is damaged. "
            "It was refused, and nothing in it was run. Use weights in safetensors, from a source that you trust."
        ) from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UntrustedModelError(
            f"{name}: it brings Python code of its own (auto_map in its config), which would run here with all your "
            "rights. Read that code; if you trust it, pass --trust_remote_code."
        ) from error


def is_peft_folder(name: str) -> bool:
    """Whether ``name`` is a local folder of adapters."""
    return (Path(name) / _ADAPTER_CONFIG).is_file()


def base_model_of(name: str) -> str:
    """Base model of a PEFT folder, else ``name`` itself.

    ``ValueError`` as in ``adapter_config``, and if that names no base model or another PEFT folder.
    """
    if not is_peft_folder(name):
        return name
    base = adapter_config(name).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{name}: its {_ADAPTER_CONFIG} lacks base_model_name_or_path, so it names no base model."
        )
    if is_peft_folder(base):
        raise ValueError(
            f"{name}: its base model {base} is a PEFT folder too. Merge that one, and name the result here."
        )
    return base


def adapter_config(folder: str) -> Any:
    """The adapters' ``adapter_config.json``; ``ValueError`` if it cannot be read."""
    try:
        return json.loads((Path(folder) / _ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: its {_ADAPTER_CONFIG} cannot be read: {error}") from error


def check_model(name: str, flag: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Config of ``name``; ``ValueError`` naming ``flag`` without such a model, or base model of a PEFT folder."""
    named, path = f"{flag} {name}", Path(name)
    if not path.is_dir() and (
        path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    ):
        raise ValueError(
            f"{named}: no such local folder, and no hub name of the form owner/model. Check the path."
        )
    try:
        if (base := base_model_of(name)) != name:
            check_model(base, f"{named}: its base model", trust_remote_code)
        return load_config(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if str(error).startswith(named):
            raise
        if str(error).startswith(f"{name}: "):
            raise ValueError(f"{flag} {error}") from error
        if path.is_dir():
            raise ValueError(f"{named}: its config cannot be read: {error}") from error
        remedy = "Check the path, the name and the network."
        if constants.HF_HUB_OFFLINE:
            remedy = "HF_HUB_OFFLINE is set: unset it, or name a folder."
        first, *_ = str(error).splitlines()
        raise ValueError(
            f"{named}: no such folder here, and no model of that name could be read from the hub ({first}). {remedy}"
        ) from error


def load_config(
    name: str, base: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Config of a model; of a PEFT folder its model_config.json, else that of its ``base``.

    ``ValueError`` for quantized weights, which are neither trained nor sampled from here.
    """
    own = Path(name) / "model_config.json"
    source = own if is_peft_folder(name) and own.is_file() else base or base_model_of(name)
    with forbid_remote_code(name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    if (method := _quantized_with(config)) is not None:
        raise ValueError(
            f"{name}: its weights are quantized ({method}), and are read here in float32 or bfloat16 only. Name the "
            "checkpoint that it was made from."
        )
    return config


def _quantized_with(config: PreTrainedConfig) -> str | None:
    """Method that a checkpoint was quantized with, by its config; None for plain weights."""
    for part in (config, config.get_text_config()):
        if options := getattr(part, "quantization_config", None):
            method = (
                options.get("quant_method") if isinstance(options, dict) else type(options).__name__
            )
            return str(method or "bitsandbytes")  # whose first configs do not name it
    return None


def language_model_class(config: PreTrainedConfig) -> Any:
    """Auto class of a model that writes text: of those that only read images beside it, the one that does."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    writes_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images and not writes_only else AutoModelForCausalLM


def context_length(config: PreTrainedConfig) -> int | None:
    """Most tokens that a model reads, by its config; None where the config does not say.

    It ends where positions begin to be rescaled for a batch's longest row, on which log-probs would then depend.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    rescaled = [kind for kind in kinds if kind.get("rope_type") in ("longrope", "dynamic")]
    ends = [
        end
        for kind in rescaled
        if (end := kind.get("original_max_position_embeddings")) is not None
    ]
    longest = next(
        (length for name in _CONTEXT_NAMES if (length := getattr(text, name, None) or 0) > 0), None
    )
    return min(ends, default=longest)


def load_tokenizer(
    name: str,
    flag: str,
    base: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Tokenizer of a model; of a PEFT folder its own, else that of its ``base``.

    A missing PAD token is left missing: masks never depend on it. ``chat_template`` is a file of one that replaces the
    tokenizer's. It always gets ``template_kwargs``; those that are reserved or that it does not use are an error, as is
    a template that takes too long. ``ValueError`` names ``flag``.
    """
    has_tokenizer = (Path(name) / "tokenizer_config.json").is_file()
    try:
        with forbid_remote_code(name):
            source = name if has_tokenizer else base or base_model_of(name)
            if Path(source).is_dir() and not any(
                any(Path(source).glob(pattern)) for pattern in _TOKENIZER_FILES
            ):
                files = "tokenizer files, such as tokenizer.json"  # transformers would invent a tokenizer
                raise ValueError(
                    f"the folder has no {files}. Copy those of the model that it was made from."
                )
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except UntrustedModelError as error:
        raise UntrustedModelError(f"{flag} {error}") from error
    except (OSError, ValueError, KeyError) as error:
        says = " ".join(str(error).split())
        raise ValueError(f"{flag} {name}: its tokenizer cannot be loaded: {says}") from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template, tokenizer, template_kwargs or {})
    elif tokenizer.chat_template:
        require_bounded(
            tokenizer,
            f"{flag} {name}: its chat template",
            None,
            template_kwargs=template_kwargs or {},
        )
    apply, template = tokenizer.apply_chat_template, str(tokenizer.chat_template or "")
    reserved = {"messages", *signature(apply).parameters} - {"tools", "documents"}
    for argument in template_kwargs or {}:
        if argument in reserved or (
            template and not re.search(rf"\b{re.escape(argument)}\b", template)
        ):
            says = f"the chat template of {flag} {name} does not use {argument!r}. Correct the name, or leave it out."
            raise ValueError(f"--chat_template_kwargs: {says}")
    if template_kwargs:
        vars(tokenizer)["apply_chat_template"] = partial(apply, **template_kwargs)
    return tokenizer


def load_processor(name: str, flag: str, trust_remote_code: bool = False) -> Any:
    """What turns text and images into a model's inputs; of a PEFT folder that of its base.

    ``ValueError`` names ``flag`` where there is none, or what it needs is not installed.
    """
    try:
        with forbid_remote_code(name):
            processor: Any = AutoProcessor.from_pretrained(
                base_model_of(name), trust_remote_code=trust_remote_code
            )
    except (
        ImportError,
        RuntimeError,
    ) as error:  # of torchvision, also where it is of another build
        what = f"{flag} {name}: its processor of images needs more packages ({' '.join(str(error).split())[:200]})"
        raise ValueError(f"{what}. Install them: pip install 'openppo[vision]'.") from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{flag} {name}: its processor of images cannot be loaded: {error}"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"{flag} {name}: the folder has no processor of images. Copy processor_config.json to it."
        )
    return processor


def _read_template(
    file: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]
) -> str:
    """The Jinja template in ``file``; ``ValueError`` if it cannot be read or compiled, or takes too long."""
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat_template {file}: cannot be read ({error}). Check the path."
        ) from error
    if not text.strip():
        raise ValueError(
            f"--chat_template {file}: the file is empty. Write a Jinja template in it."
        )
    require_bounded(
        tokenizer, f"--chat_template {file}: the template", text, template_kwargs=template_kwargs
    )
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], chat_template=text, tokenize=False
        )
    except TemplateSyntaxError as error:
        raise ValueError(
            f"--chat_template {file}, line {error.lineno}: {error.message}. Correct it."
        ) from error
    except TEMPLATE_ERRORS:
        pass  # of these messages; rows have others
    return text


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id to fill padded places with: PAD, else EOS, else 0. Nothing is ever inferred from it."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token_id) for token_id in ids if token_id is not None), 0)


def check_token_ids(
    config: PreTrainedConfig,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Sequence[int]],
) -> None:
    """Refuse token ids of ``rows``, or PAD, without an embedding. ``model`` is a flag and a name.

    A tokenizer may know more tokens than a model (Gemma 3) as long as none occurs.
    """
    n_embeddings = config.get_text_config().vocab_size
    largest = max([pad_token_id(tokenizer), *(max(row, default=0) for row in rows)])
    if largest >= n_embeddings:
        token, n_tokens = tokenizer.convert_ids_to_tokens(largest), len(tokenizer)
        raise ValueError(
            f"{model}: token {token!r} has the id {largest}, and the model has embeddings of {n_embeddings} ids; its "
            f"tokenizer knows {n_tokens} tokens. Use resize_token_embeddings, or leave that token out."
        )


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Every id that ends a response and that the model has: of generation config, model config and tokenizer."""
    text = model.config.get_text_config()
    found: set[int] = set()  # of images and text it may be in one only
    for source in (model.generation_config, model.config, text, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(token_id for token_id in found if token_id < text.vocab_size)


def sampled_ids(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, n_logits: int | None = None
) -> SampledIds:
    """Ids that a policy with ``config`` can sample: known to its tokenizer, and standing for no image or video.

    A model has more where its embeddings are padded, or were resized. A reference may have more still: ``n_logits``.
    """
    known, n_ids = {*tokenizer.get_vocab().values()}, config.get_text_config().vocab_size
    if not isinstance(tokenizer, PreTrainedTokenizerFast):  # ids of equal texts are one entry there
        known.update(range(tokenizer.vocab_size))
    kinds = placeholders(config)
    sampled = sorted(token_id for token_id in known - kinds.keys() if 0 <= token_id < n_ids)
    bounds = pairwise([-1, *sampled, n_ids if n_logits is None else n_logits])
    gaps = [range(before + 1, after) for before, after in bounds]
    return SampledIds(
        tuple(gap for gap in gaps if gap), {i: kind for i, kind in kinds.items() if i < n_ids}
    )


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of a model's layers, by its config."""
    text = config.get_text_config()
    named = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if named:
        return set(named)
    windows = {"sliding_window": "sliding_attention", "keep_window_size": "dynamic_mask"}
    found = {kind for name, kind in windows.items() if getattr(text, name, None) is not None}
    return found or {"full_attention"}
