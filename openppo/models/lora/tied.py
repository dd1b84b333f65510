"""Adapters on a weight that two layers share, as the head and the embeddings of small models often do."""

from __future__ import annotations

from typing import Any

from torch import nn


def refuse_tied(adapted: nn.Module) -> None:
    """``ValueError`` for a PEFT model with such an adapter: merging it would change the other layer as well."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # a PEFT model is there, so it is loaded already

    layers: dict[int, str] = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            base: Any = layer.get_base_layer()
            layers.update({id(parameter): name for parameter in base.parameters(recurse=False)})
    for name, parameter in adapted.named_parameters(remove_duplicate=False):
        layer_name = layers.get(id(parameter))
        if layer_name is not None and not name.startswith(f"{layer_name}."):
            raise ValueError(
                f"there is an adapter on {layer_name}, whose weight is also {name}: merged, it would change both. "
                "Leave that layer out."
            )
