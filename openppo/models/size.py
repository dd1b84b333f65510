"""A model in numbers, counted from its config without its weights, and the kinds of its layers."""

import copy
import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from openppo.models.actor import ends_in_head
from openppo.models.disabling import disable_outputs
from openppo.models.pretrained import language_model_class, layer_kinds
from openppo.models.scalar_head import classifier_of
from openppo.models.vision_models import vision_part


class ModelSize(NamedTuple):
    """Numbers of elements."""

    n_parameters: int
    n_quantized: int  # weights of linear layers except the head
    layers: int
    hidden: int
    width: int  # inputs and outputs of one layer's linear layers, the widest once more
    adapter: int  # LoRA parameters of rank 1
    cache: int  # keys and values of one token
    vocabulary: int  # 0 with a scalar head
    whole_logits: bool = False  # also where there are many: see ``ends_in_head``
    tower: int = 0  # parameters of what reads images
    connector: int = 0
    patch_layers: int = 0  # layers of the tower
    patch_width: int = 0  # as ``width``, of one of them
    n_frozen: int = 0  # parameters, without LoRA

    def n_trained(self, lora_rank: int) -> int:
        """Trained parameters: all but those that are frozen, or with LoRA the adapters and a scalar head."""
        head = 0 if self.vocabulary else self.hidden
        return (
            lora_rank * self.adapter + head if lora_rank > 0 else self.n_parameters - self.n_frozen
        )


def model_size(
    config: PreTrainedConfig,
    scalar: bool = False,
    targets: Sequence[str] = ("all-linear",),
    trust: bool = False,
) -> ModelSize:
    """Count a language model, or with a ``scalar`` head a critic or reward model. ``targets``: ``--target_modules``."""
    kind: Any
    kind, own = (
        classifier_of(config) if scalar else (language_model_class(config), copy.deepcopy(config))
    )
    with torch.device("meta"):
        module = (
            kind.from_config(own, trust_remote_code=trust)
            if hasattr(kind, "from_config")
            else kind(own)
        )
    disable_outputs(module)  # as models are run; its config is a copy
    text: Any = config.get_text_config()
    heads = [id(module.get_output_embeddings()), id(getattr(module, "score", None))]
    layers = [
        (n, m)
        for n, m in module.named_modules()
        if isinstance(m, nn.Linear | Conv1D) and id(m) not in heads
    ]
    shapes = {f".{name}": layer.weight.shape for name, layer in layers if vision_part(name) is None}
    of_tower = [layer.weight.shape for name, layer in layers if vision_part(name) == "tower"]
    parts = Counter[str | None]()
    for name, parameter in module.named_parameters():
        parts[vision_part(name)] += parameter.numel()
    vision = getattr(config, "vision_config", None)
    patch_layers: int = (
        getattr(vision, "num_hidden_layers", None) or getattr(vision, "depth", None) or 0
    )
    ends = ("",) if "all-linear" in targets else tuple(f".{target}" for target in targets)
    return ModelSize(
        n_parameters=sum(parameter.numel() for parameter in module.parameters()),
        n_quantized=sum(layer.weight.numel() for _, layer in layers),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        width=sum(map(sum, shapes.values())) // text.num_hidden_layers
        + max(map(max, shapes.values()), default=0),
        adapter=sum(sum(shape) for name, shape in shapes.items() if name.endswith(ends)),
        cache=cache_elements(config),
        vocabulary=0 if scalar else text.vocab_size,
        whole_logits=not scalar and not ends_in_head(module),
        tower=parts["tower"],
        connector=parts["connector"],
        patch_layers=patch_layers,
        patch_width=sum(map(sum, of_tower)) // max(1, patch_layers),
    )


def n_elements(parameter: Any) -> int:
    """Elements of a whole parameter, also one that ZeRO-3 partitions or bitsandbytes packs."""
    packed = getattr(parameter, "quant_state", None)
    return int(
        getattr(parameter, "ds_numel", 0) or (parameter if packed is None else packed.shape).numel()
    )


def cache_elements(config: PreTrainedConfig) -> int:
    """Elements of the key-value cache for one token; where layers differ, as if all were the largest."""
    text: Any = config.get_text_config()
    heads = _largest(text, "num_key_value_heads") or _largest(text, "num_attention_heads") or 0
    width = _largest(text, "head_dim") or text.hidden_size // max(
        1, _largest(text, "num_attention_heads") or 1
    )
    return int(2 * text.num_hidden_layers * heads * width)


def _largest(text: Any, name: str) -> int | None:
    """A size in a model's config, the largest where layers differ."""
    try:
        found: Any = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to read it from the config of all layers
        found = [getattr(text.per_layer_config[i], name) for i in range(text.num_hidden_layers)]
    return max(found) if isinstance(found, list | tuple) else found


# Layers of these kinds keep keys and values alone, one of each for a token and a head.
_CACHED = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "dynamic_mask",
    "global",
    "local",
}


def check_cache(config: PreTrainedConfig) -> None:
    """``ValueError`` for models that keep something else than keys and values of their own in each layer."""
    text = config.get_text_config()
    kinds = sorted(layer_kinds(config) - _CACHED)
    if (getattr(text, "num_kv_shared_layers", None) or 0) > 0:
        kinds.append("shared keys and values")
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: code of its own
    if (
        not kinds
        and model is not None
        and "past_key_values" not in inspect.signature(model.forward).parameters
    ):
        kinds.append("no key-value cache")
    if kinds:
        raise ValueError(
            f"{text.model_type} has layers with {', '.join(kinds)}, from which OpenPPO's engine cannot sample: take a "
            "model whose layers all have attention of their own."
        )
