"""A transformer in numbers: from its config, and parameters counted on the meta device, where they take no memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from openppo.models.classifier import classifier_of

Head = Literal["vocabulary", "scalar"]

PERSISTENT_BELOW = 100_000
"""Parameters with fewer elements stay whole under ZeRO-3 (DeepSpeed's ``stage3_param_persistence_threshold``)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements. ``linears`` are (in, out) of the layers that ``--target_modules`` would give an adapter."""

    n_parameters: int
    n_quantized: int
    """Parameters of linear layers but for heads: what ``--load_in_4bit`` keeps in 4 bits."""
    n_small: int
    """Parameters in tensors so small that ZeRO-3 keeps them whole on each rank."""
    largest: int
    """Elements of the largest parameter."""
    layers: int
    hidden: int
    queries: int
    """Attention heads x their width."""
    heads: int
    keys: int
    """Key-value heads x their width."""
    intermediate: int
    gated: bool
    """Whether the MLP has a gate beside its two matrices (SwiGLU)."""
    composed_gelu: bool
    """Whether the activation is a GELU of several operations (GPT-2's)."""
    normed_queries: bool
    """Whether queries and keys are normalized (Qwen3)."""
    vocabulary: int
    """Width of the head's output; 0 for a scalar head."""
    linears: tuple[tuple[int, int], ...]

    @property
    def cache_per_token(self) -> int:
        """Elements that the key-value cache holds for one token."""
        return 2 * self.layers * self.keys

    def adapter_sizes(self, rank: int) -> list[int]:
        """Elements of each adapter matrix: rank x in and out x rank for each layer."""
        return [rank * width for pair in self.linears for width in pair]

    def kept_whole(self, lora_rank: int) -> int:
        """Elements of all parameters, adapters too, that ZeRO-3 does not partition."""
        return self.n_small + sum(size for size in self.adapter_sizes(lora_rank) if size < PERSISTENT_BELOW)


def model_shape(
    model_config: PreTrainedConfig,
    head: Head,
    target_modules: Sequence[str] = ("all-linear",),
    trust_remote_code: bool = False,
) -> ModelShape:
    """The shape of a causal language model, or with a "scalar" head of a critic or reward model; loads no weights."""
    made: tuple[Any, Any] = AutoModelForCausalLM, copy.deepcopy(model_config)  # building writes into it
    kind, config = made if head == "vocabulary" else classifier_of(model_config)
    with torch.device("meta"):
        module = kind.from_config(config, trust_remote_code=trust_remote_code)
    text: Any = model_config.get_text_config()
    sizes = [parameter.numel() for parameter in module.parameters()]
    linears = _linears(module)
    heads = _largest(text, "num_attention_heads") or 0  # none in a model without attention
    width = _largest(text, "head_dim") or text.hidden_size // max(heads, 1)
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)  # GPT-2's name
    intermediate = _largest(text, "intermediate_size") or _largest(text, "n_inner") or 4 * text.hidden_size
    return ModelShape(
        n_parameters=sum(sizes),
        n_quantized=sum(a * b for a, b in linears.values()),
        n_small=sum(size for size in sizes if size < PERSISTENT_BELOW),
        largest=max(sizes),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=heads * width,
        heads=heads,
        keys=(_largest(text, "num_key_value_heads") or heads) * width,
        intermediate=intermediate,
        gated=_width_of_mlps(linears, intermediate) >= 2 * intermediate * text.num_hidden_layers,
        composed_gelu=activation in ("gelu_new", "gelu_fast"),
        normed_queries=any(name.endswith(".q_norm") for name, _ in module.named_modules()),
        vocabulary=text.vocab_size if head == "vocabulary" else 0,
        linears=tuple(pair for name, pair in linears.items() if _is_target(name, target_modules)),
    )


def _largest(text: Any, name: str) -> int | None:
    """A size that the config has, or None; where layers differ, the largest."""
    try:
        found: Any = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to read it from the config of all layers
        found = [getattr(text.per_layer_config[i], name) for i in range(text.num_hidden_layers)]
    return max(found) if isinstance(found, list | tuple) else found


def _linears(module: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of all linear layers but heads, by name."""
    heads = {id(getattr(module, "score", None)), id(module.get_output_embeddings())}  # type: ignore[operator]
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and id(layer) not in heads:
            found[name] = (layer.in_features, layer.out_features)
        elif isinstance(layer, Conv1D):  # GPT-2's linear layer
            found[name] = (layer.weight.shape[0], layer.weight.shape[1])
    return found


def _width_of_mlps(linears: dict[str, tuple[int, int]], intermediate: int) -> int:
    """Summed output of the layers that feed activations; Phi-3 has gate and branch in one."""
    return sum(out for _, out in linears.values() if out in (intermediate, 2 * intermediate))


def _is_target(name: str, target_modules: Sequence[str]) -> bool:
    return "all-linear" in target_modules or any(name == t or name.endswith(f".{t}") for t in target_modules)
