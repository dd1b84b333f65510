"""Size of a model, counted from its config without weights, and a check of its layers' caches."""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
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
    """Numbers of elements of a model."""

    n_parameters: int
    n_quantized: int  # weights of linear layers except the head
    layers: int
    hidden: int
    width: int  # inputs and outputs of one layer's linear layers, the widest counted twice
    adapter: int  # LoRA parameters of rank 1
    cache: int  # keys and values of one token
    vocabulary: int  # 0 with a scalar head
    whole_logits: bool = False  # true if the model always returns full logits: see ``ends_in_head``
    tower: int = 0  # parameters of the vision tower
    connector: int = 0
    patch_layers: int = 0  # layers of the tower
    patch_width: int = 0  # as ``width``, for one layer of the tower
    n_frozen: int = 0  # parameters, without LoRA

    def n_trained(self, lora_rank: int) -> int:
        """Count the trained parameters; with LoRA they are the adapters and a scalar head."""
        if lora_rank > 0:
            head = 0 if self.vocabulary else self.hidden
            return lora_rank * self.adapter + head
        return self.n_parameters - self.n_frozen


def model_size(
    config: PreTrainedConfig,
    scalar: bool = False,
    targets: Sequence[str] = ("all-linear",),
    trust: bool = False,
) -> ModelSize:
    """Count a language model, or with a ``scalar`` head a critic or reward model.

    ``targets`` are those of ``--target_modules``.
    """
    module = without_weights(config, scalar, trust)
    text: Any = config.get_text_config()

    layers = dict(_linear_layers(module))
    shapes: dict[str, Any] = {}
    tower_shapes = []
    for name, layer in layers.items():
        part = vision_part(name)
        if part is None:
            shapes[f".{name}"] = layer.weight.shape
        elif part == "tower":
            tower_shapes.append(layer.weight.shape)

    all_widths = sum(sum(shape) for shape in shapes.values())
    widest = max((max(shape) for shape in shapes.values()), default=0)
    endings = tuple(f".{target}" for target in targets)
    if "all-linear" in targets:
        endings = ("",)
    adapted = [shape for name, shape in shapes.items() if name.endswith(endings)]

    part_sizes = Counter[str | None]()
    for name, parameter in module.named_parameters():
        part_sizes[vision_part(name)] += parameter.numel()
    patch_layers = _n_tower_layers(config)
    tower_widths = sum(sum(shape) for shape in tower_shapes)

    return ModelSize(
        n_parameters=part_sizes.total(),
        n_quantized=sum(layer.weight.numel() for layer in layers.values()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        width=all_widths // text.num_hidden_layers + widest,
        adapter=sum(sum(shape) for shape in adapted),
        cache=cache_elements(config),
        vocabulary=0 if scalar else text.vocab_size,
        whole_logits=not scalar and not ends_in_head(module),
        tower=part_sizes["tower"],
        connector=part_sizes["connector"],
        patch_layers=patch_layers,
        patch_width=tower_widths // max(1, patch_layers),
    )


def without_weights(config: PreTrainedConfig, scalar: bool, trust: bool) -> Any:
    """Build the model on the meta device from a copy of ``config``, its extra outputs disabled."""
    kind: Any
    if scalar:
        kind, config = classifier_of(config)
    else:
        kind, config = language_model_class(config), deepcopy(config)

    is_auto = hasattr(kind, "from_config")
    with torch.device("meta"):
        module = kind.from_config(config, trust_remote_code=trust) if is_auto else kind(config)
    disable_outputs(module)
    return module


def _linear_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and linear layers, without the heads."""
    heads = (module.get_output_embeddings(), getattr(module, "score", None))
    head_ids = {id(head) for head in heads}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and id(layer) not in head_ids:
            yield name, layer


def _n_tower_layers(config: PreTrainedConfig) -> int:
    """Number of layers of the vision tower; 0 without one."""
    vision = getattr(config, "vision_config", None)
    return getattr(vision, "num_hidden_layers", None) or getattr(vision, "depth", None) or 0


def n_elements(parameter: Any) -> int:
    """Count the elements of a whole parameter, even if ZeRO-3 partitions or bitsandbytes packs it."""
    n_partitioned = getattr(parameter, "ds_numel", 0)
    if n_partitioned:
        return int(n_partitioned)
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return int(packed.shape.numel())
    return int(parameter.numel())


def cache_elements(config: PreTrainedConfig) -> int:
    """Count the elements of the key-value cache for one token, as if all layers were as large as the largest."""
    text: Any = config.get_text_config()
    query_heads = _largest(text, "num_attention_heads") or 0
    heads = _largest(text, "num_key_value_heads") or query_heads
    width = _largest(text, "head_dim") or text.hidden_size // max(1, query_heads)
    return int(2 * text.num_hidden_layers * heads * width)


def _largest(text: Any, name: str) -> int | None:
    """Size in a model's config; the largest if layers differ."""
    try:
        size: Any = getattr(text, name, None)
    except RuntimeError:  # layers differ, so transformers refuses to name one size
        size = [getattr(text.per_layer_config[i], name) for i in range(text.num_hidden_layers)]
    if isinstance(size, list | tuple):
        return max(size)
    return size


_CACHED = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "dynamic_mask",
    "global",
    "local",
}
"""Kinds of layers whose cache is one key and one value for each token and head."""


def check_cache(config: PreTrainedConfig) -> None:
    """``ValueError`` for models with layers that keep anything but their own keys and values."""
    text = config.get_text_config()
    kinds = sorted(layer_kinds(config) - _CACHED)
    if (getattr(text, "num_kv_shared_layers", None) or 0) > 0:
        kinds.append("shared keys and values")

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # None: code of its own
    if not kinds and model is not None:
        arguments = inspect.signature(model.forward).parameters
        if "past_key_values" not in arguments:
            kinds.append("no key-value cache")

    if kinds:
        raise ValueError(
            f"{text.model_type} has layers with {', '.join(kinds)}, from which OpenPPO's engine cannot sample: take a "
            "model whose layers all have attention of their own."
        )
