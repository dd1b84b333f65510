"""The weights of a policy for an engine that samples with it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import Tensor, nn

from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel


class PolicyWeights:
    """Weights of ``model.module.model``, a Hugging Face or PEFT model. All ranks call every method together."""

    def __init__(self, strategy: DeepspeedStrategy, model: TrainableModel) -> None:
        self.strategy = strategy
        self.model = model

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Inside, the module may be called: under ZeRO-3 it has whole weights, unless all ranks call it together."""
        return self.strategy.for_generation(self.model, in_lockstep)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole weight, one by one, of the Hugging Face model with adapters added; nothing changes.

        Under ZeRO-3 each is gathered when it is its turn, and copied.
        """
        policy: Any = self.model.module.model
        yield from merged_weights(policy)


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    """``weight`` with all active adapters of a peft ``layer``, summed in float32."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)


def merged_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """``PolicyWeights.merged`` of a Hugging Face or PEFT model."""
    adapted = hasattr(policy, "peft_config")
    model: nn.Module = policy.get_base_model() if adapted else policy
    layers = _adapted_layers(model) if adapted else {}
    adapters = {f"{name}.{inner}" for name, layer in layers.items() for inner, _ in layer.named_parameters()}
    bases = {f"{name}.base_layer.weight": name for name in layers}
    for name, parameter in model.named_parameters():
        if name in bases:
            layer = layers[bases[name]]
            involved: list[Any] = list(layer.parameters())
            with GatheredParameters(involved, enabled=hasattr(parameter, "ds_id")):
                weight = _merged(parameter, layer)
            yield f"{bases[name]}.weight", weight
        elif name in adapters and ".base_layer." not in name:
            continue
        else:
            partitioned = hasattr(parameter, "ds_id")
            with GatheredParameters([parameter], enabled=partitioned):
                weight = parameter.detach().clone() if partitioned else parameter.detach()
            yield name.replace(".base_layer.", "."), weight


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers with adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # a PEFT model is there, so it is loaded already

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
