"""Configs and tokenizers of pretrained models, read before any weight; their own code is refused."""

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import constants
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

from openppo.models.chat_template import check_template_kwargs, read_template
from openppo.models.sampled_ids import SampledIds
from openppo.models.template_limits import require_bounded
from openppo.models.vision_models import placeholders

_ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "*.tiktoken")
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
)
"""Names of the number of positions; not ``seq_length``, which for BLOOM is the length in training."""


class UntrustedModelError(ValueError):
    """A model or tokenizer that would run code of its own."""


@contextmanager
def forbid_remote_code(name: str) -> Iterator[None]:
    """Context of ``from_pretrained``: ``UntrustedModelError`` if ``name`` holds code, or pickles beyond tensors."""
    try:
        yield
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        # weights_only raised this, so nothing has run; other runtime errors are not about a file.
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
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
    """True if ``name`` is a local folder of adapters."""
    return (Path(name) / _ADAPTER_CONFIG).is_file()


def base_model_of(name: str) -> str:
    """Return the base model of a PEFT folder, else ``name`` itself.

    ``ValueError`` as in ``adapter_config``, and if it names no base model or another PEFT folder.
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
    """Read the ``adapter_config.json`` of a PEFT folder; ``ValueError`` if that fails."""
    try:
        return json.loads((Path(folder) / _ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: its {_ADAPTER_CONFIG} cannot be read: {error}") from error


def check_model(name: str, flag: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of ``name``; ``ValueError`` naming ``flag`` without it or its base model."""
    named = f"{flag} {name}"
    path = Path(name)
    is_path = path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not path.is_dir():
        raise ValueError(
            f"{named}: no such local folder, and no hub name of the form owner/model. Check the path."
        )

    try:
        base = base_model_of(name)
        if base != name:
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


def require_text_model(name: str, flag: str, config: PreTrainedConfig) -> None:
    """``ValueError`` naming ``flag`` for a reward model or critic, whose weights may load as a causal model."""
    kinds = list(config.architectures or ())
    if is_peft_folder(name):
        kinds.append(str(adapter_config(name).get("task_type")))
    heads = [kind for kind in kinds if kind.endswith(("Classification", "SEQ_CLS"))]
    if heads:
        raise ValueError(
            f"{flag} {name}: a reward model or critic ({heads[0]}), which gives scores and no text. Name a language "
            "model."
        )


def load_config(
    name: str, base: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Load the config of a model; for a PEFT folder, its model_config.json or else the config of ``base``.

    ``ValueError`` for quantized weights, which are neither trained nor sampled from here.
    """
    saved_config = Path(name) / "model_config.json"
    has_saved_config = is_peft_folder(name) and saved_config.is_file()
    source = saved_config if has_saved_config else base or base_model_of(name)

    config: PreTrainedConfig
    with forbid_remote_code(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    method = _quantized_with(config)
    if method is not None:
        raise ValueError(
            f"{name}: its weights are quantized ({method}), and are read here in float32 or bfloat16 only. Name the "
            "checkpoint that it was made from."
        )
    return config


def _quantized_with(config: PreTrainedConfig) -> str | None:
    """Method that a checkpoint was quantized with, by its config; None for plain weights."""
    for part in (config, config.get_text_config()):
        options = getattr(part, "quantization_config", None)
        if not options:
            continue
        if isinstance(options, dict):
            # The first configs of bitsandbytes do not name it.
            return str(options.get("quant_method") or "bitsandbytes")
        return type(options).__name__
    return None


def language_model_class(config: PreTrainedConfig) -> Any:
    """Auto class of a model that writes text; the one with a vision tower only if there is no other."""
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if reads_images and not is_causal else AutoModelForCausalLM


def context_length(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens that a model reads; None if its config does not say.

    The context ends where positions would be rescaled by a batch's longest row: log-probs would depend on that row.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parameter_sets = [rope, *rope.values()]
    limits = []
    for parameters in parameter_sets:
        if not isinstance(parameters, dict):
            continue
        limit = parameters.get("original_max_position_embeddings")
        is_rescaled = parameters.get("rope_type") in ("longrope", "dynamic")
        if is_rescaled and limit is not None:
            limits.append(limit)
    if limits:
        return min(limits)

    for name in _CONTEXT_NAMES:
        length: int = getattr(text, name, None) or 0
        if length > 0:
            return length
    return None


def load_tokenizer(
    name: str,
    flag: str,
    base: str | None = None,
    trust_remote_code: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; for a PEFT folder, its own or else that of ``base``.

    A missing PAD token is left missing: masks never depend on it. ``chat_template`` names a file with a template to
    replace the tokenizer's. The template always gets ``template_kwargs``; reserved and unused ones are an error, as is
    a template that takes too long. ``ValueError`` names ``flag``.
    """
    template_kwargs = template_kwargs or {}
    tokenizer = _load_plain_tokenizer(name, flag, base, trust_remote_code=trust_remote_code)

    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template, tokenizer, template_kwargs)
    elif tokenizer.chat_template:
        source = f"{flag} {name}: its chat template"
        require_bounded(tokenizer, source, None, template_kwargs=template_kwargs)

    check_template_kwargs(tokenizer, f"{flag} {name}", template_kwargs)
    if template_kwargs:
        apply = tokenizer.apply_chat_template
        vars(tokenizer)["apply_chat_template"] = partial(apply, **template_kwargs)
    return tokenizer


def _load_plain_tokenizer(
    name: str, flag: str, base: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Load a tokenizer as it was saved; ``ValueError`` naming ``flag``."""
    has_tokenizer = (Path(name) / "tokenizer_config.json").is_file()
    tokenizer: PreTrainedTokenizerBase
    try:
        with forbid_remote_code(name):
            source = name if has_tokenizer else base or base_model_of(name)
            _require_tokenizer_files(Path(source))
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except UntrustedModelError as error:
        raise UntrustedModelError(f"{flag} {error}") from error
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{flag} {name}: its tokenizer cannot be loaded: {reason}") from error
    return tokenizer


def _require_tokenizer_files(source: Path) -> None:
    """``ValueError`` for a folder without tokenizer files: transformers would invent a tokenizer."""
    if not source.is_dir():
        return
    for pattern in _TOKENIZER_FILES:
        if any(source.glob(pattern)):
            return
    raise ValueError(
        "the folder has no tokenizer files, such as tokenizer.json. Copy those of the model that it was made from."
    )


def load_processor(name: str, flag: str, trust_remote_code: bool = False) -> Any:
    """Load the processor of text and images for a model, or for a PEFT folder's base.

    ``ValueError`` names ``flag`` if there is none, or a package that it needs is not installed.
    """
    processor: Any
    try:
        with forbid_remote_code(name):
            source = base_model_of(name)
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (ImportError, RuntimeError) as error:
        # Raised by torchvision, if it is missing or built for another torch.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{flag} {name}: its processor of images needs more packages ({reason}). Install them: pip install "
            "'openppo[vision]'."
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{flag} {name}: its processor of images cannot be loaded: {error}"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"{flag} {name}: the folder has no processor of images. Copy processor_config.json to it."
        )
    return processor


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id for padded places: PAD, else EOS, else 0. Nothing is ever inferred from it."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def check_token_ids(
    config: PreTrainedConfig,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Sequence[int]],
) -> None:
    """``ValueError`` for token ids of ``rows``, or PAD, without an embedding.

    ``model`` is a flag and a name. A tokenizer may know more tokens than a model (Gemma 3) if no row has one of these.
    """
    n_embeddings = config.get_text_config().vocab_size
    largest = max([pad_token_id(tokenizer), *(max(row, default=0) for row in rows)])
    if largest >= n_embeddings:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ValueError(
            f"{model}: token {token!r} has the id {largest}, and the model has embeddings of {n_embeddings} ids; its "
            f"tokenizer knows {len(tokenizer)} tokens. Use resize_token_embeddings, or leave that token out."
        )


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Ids that end a response, by the model's generation config, the model config or the tokenizer."""
    text = model.config.get_text_config()
    # A model of images and text may have them in one of its two configs only.
    ids = end_ids([model.generation_config, model.config, text, tokenizer])
    return sorted(token_id for token_id in ids if token_id < text.vocab_size)


def end_ids(sources: Iterable[Any]) -> set[int]:
    """Ids that configs and tokenizers name as ``eos_token_id``."""
    all_ids = set[int]()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        all_ids.update([ids] if isinstance(ids, int) else ids or [])
    return all_ids


def sampled_ids(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, n_logits: int | None = None
) -> SampledIds:
    """Ids that a policy can sample: known to its tokenizer, and not placeholders for images or videos.

    Models with padded or resized embeddings have more ids, and a reference may have more still, namely ``n_logits``.
    """
    n_ids = config.get_text_config().vocab_size
    if n_logits is None:
        n_logits = n_ids
    known = set(tokenizer.get_vocab().values())
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        # In the vocabulary of a slow tokenizer, ids of equal texts are a single entry.
        known.update(range(tokenizer.vocab_size))

    kinds = placeholders(config)
    sampled = sorted(token_id for token_id in known - kinds.keys() if 0 <= token_id < n_ids)
    gaps = []
    for before, after in pairwise([-1, *sampled, n_logits]):
        gap = range(before + 1, after)
        if gap:
            gaps.append(gap)
    placeholder_kinds = {token_id: kind for token_id, kind in kinds.items() if token_id < n_ids}
    return SampledIds(tuple(gaps), placeholder_kinds)


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """Kinds of a model's layers, by its config."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None)
    if kinds:
        return set(kinds)
    windows = {"sliding_window": "sliding_attention", "keep_window_size": "dynamic_mask"}
    windowed = {kind for name, kind in windows.items() if getattr(text, name, None) is not None}
    return windowed or {"full_attention"}
