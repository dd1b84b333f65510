"""Trained model: forward, backward with explicit boundaries, clipped optimizer step, schedule; its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters, unwrap_model_for_generation
from torch import Tensor, nn

from openppo.strategy.launches import LaunchWatch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in Adam's state."""
GATHERED_BYTES = 2**30
"""Approximate size of a group of weights to gather together, since each gathering waits for the device."""


class TrainableModel:
    """A DeepSpeed engine with the few operations that training loops need.

    Between two calls of ``step``, call ``backward`` once for each micro-batch, the last time with
    ``last=True``. Losses are not scaled in any way; DeepSpeed averages gradients over ranks, so a loss that is a
    sum over this rank's share, divided by a total over all ranks, must be multiplied by the number of ranks.

    ``uncompiled`` is ``DeepspeedStrategy.uncompiled``.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        uncompiled: Callable[[], AbstractContextManager[None]],
        launches: LaunchWatch,
    ) -> None:
        self.deepspeed = engine
        self.scheduler = scheduler
        self._uncompiled = uncompiled
        self._launches = launches
        self.merges_adapters = False
        """True if ``gathered``, when not in lockstep, merges adapters."""
        self._pinned: dict[tuple[int, str], Tensor] = {}
        """Host memory of offloaded moments, kept since pinning takes long."""

    @property
    def module(self) -> nn.Module:
        """The prepared module."""
        return self.deepspeed.module

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next optimizer step."""
        return float(self.scheduler.get_last_lr()[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._launches.before_forward()
        return self.deepspeed(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        """Switch the module between training and evaluation mode."""
        self.deepspeed.train(mode)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulate gradients of the scalar ``loss``; ``last`` marks the last micro-batch before ``step``.

        A loss that is not finite makes the whole gradient NaN, which ``step`` finds on all ranks.
        """
        loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
        # Set before the backward too: ZeRO-1 and 2 reduce gradients in hooks that read the boundary.
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss)
        self._launches.after_backward(last)

    def offload_adam_moments(self) -> None:
        """Move Adam's moments to the host; ``load_adam_moments`` must come before the next ``step``.

        DeepSpeed's ``offload_states`` needs ZeRO-1 or 2, or DeepSpeed's own Adam.
        """
        for key, state, name in self._adam_moments():
            moment = state[name]
            if key not in self._pinned:
                self._pinned[key] = torch.empty_like(
                    moment, device="cpu", pin_memory=moment.is_cuda
                )
            state[name] = self._pinned[key].copy_(moment)

    def load_adam_moments(self) -> None:
        """Move Adam's moments back to the device of the weights."""
        device = self.deepspeed.device
        for key, state, name in self._adam_moments():
            moment = state[name]
            if moment is self._pinned.get(key):
                state[name] = moment.to(device, non_blocking=True, copy=True)

    def reset_adam(self) -> None:
        """Zero Adam's moments and step count; weights and schedule stay.

        Call it on all ranks alike; the moments may be on the host. GLM-5 (arXiv 2602.15763) resets Adam when its
        engines get new weights.
        """
        for _, state, name in self._adam_moments():
            state[name].zero_()
            state["step"] = 0 * state["step"]  # a tensor, or a number in DeepSpeed's Adam

    def _adam_moments(self) -> Iterator[tuple[tuple[int, str], dict[str, Tensor], str]]:
        """Yield key, owner and name of each moment that Adam has created."""
        adam: Any = self.deepspeed.basic_optimizer
        for number, state in enumerate(adam.state.values()):
            for name in MOMENTS:
                if name in state:
                    yield (number, name), state, name

    def step(self) -> float:
        """Clip, update, advance the schedule. Returns the gradient's L2 norm before clipping.

        When that is not finite, on all ranks alike, neither weights nor optimizer nor schedule change.
        """
        if self.deepspeed.zero_optimization_stage() == 0:
            # In this case DeepSpeed neither reports a norm nor skips a step.
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if math.isfinite(norm):
                self.deepspeed.step()
            else:
                self.deepspeed.zero_grad()
        else:
            self.deepspeed.step()
            norm = float(self.deepspeed.get_global_grad_norm())

        if math.isfinite(norm):
            self.scheduler.step()
        return norm

    def merge_when_gathered(self) -> None:
        """Have ``gathered``, when not in lockstep, merge adapters; see ``DeepspeedStrategy.fits_merged``."""
        self.merges_adapters = True

    @contextmanager
    def gathered(self, in_lockstep: bool = False) -> Iterator[None]:
        """Context in which each rank alone, or all in lockstep, call the module; its layers run uncompiled.

        Under ZeRO-3 the module has whole weights and no hooks, unless in lockstep. All ranks enter together.
        """
        with ExitStack() as stack:
            if not in_lockstep and self.deepspeed.zero_optimization_stage() == 3:
                stack.enter_context(unwrap_model_for_generation(self.deepspeed))
            if not in_lockstep and self.merges_adapters:
                stack.enter_context(adapters_merged(self.module))
            stack.enter_context(self._uncompiled())
            yield

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``merged_weights`` of the policy; all ranks together."""
        policy: Any = self.module
        return merged_weights(policy.model)


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers of PEFT with adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # seconds of imports

    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)
    }


@contextmanager
def adapters_merged(module: nn.Module) -> Iterator[None]:
    """Merge adapters into the weights; on exit the weights are restored bit for bit.

    Weights keep their addresses, since recorded decode steps read from these.
    """
    originals: dict[Any, Tensor] = {}
    try:
        for layer in adapted_layers(module).values():
            weight = layer.base_layer.weight.data
            originals[layer] = weight.clone()
            weight.copy_(_merged(weight, layer))
            # peft's forwards then leave these adapters out.
            layer.merged_adapters = list(layer.active_adapters)
        yield
    finally:
        for layer, original in originals.items():
            layer.base_layer.weight.data.copy_(original)
            layer.merged_adapters = []


def merged_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole weight of a Hugging Face or PEFT model with adapters added; the model does not change.

    Under ZeRO-3 they are gathered about 1 GiB at a time, and copied.
    """
    model: nn.Module = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    layers = adapted_layers(model)
    weights = _without_adapters(model, layers)
    partitioned = any(hasattr(p, "ds_id") for _, p in weights)
    for group in _gather_groups(weights, partitioned):
        merged = _merge_group(group, layers, partitioned)
        yield from merged
        del merged  # before the next group is gathered


def _without_adapters(model: nn.Module, layers: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and parameter of a model's own weights, including those inside adapted layers."""
    inside_layers = set()
    for prefix, layer in layers.items():
        inside_layers |= {f"{prefix}.{name}" for name, _ in layer.named_parameters()}
    return [
        (name, weight)
        for name, weight in model.named_parameters()
        if name not in inside_layers or ".base_layer." in name
    ]


def _gather_groups(
    weights: list[tuple[str, Any]], partitioned: bool
) -> Iterator[list[tuple[str, Any]]]:
    """Yield weights in groups to gather together; without partitions, one by one."""
    if not partitioned:
        for named_weight in weights:
            yield [named_weight]
        return

    group: list[tuple[str, Any]] = []
    start = 0  # bytes of all earlier weights
    group_number = 0
    for name, weight in weights:
        if start // GATHERED_BYTES != group_number:
            yield group
            group = []
            group_number = start // GATHERED_BYTES
        group.append((name, weight))
        start += weight.ds_numel * weight.element_size()
    if group:
        yield group


def _merge_group(
    group: list[tuple[str, Any]], layers: dict[str, Any], partitioned: bool
) -> list[tuple[str, Tensor]]:
    """Gather the weights of a group and return them whole, by name, with adapters added."""
    owners = [layers.get(name.removesuffix(".base_layer.weight")) for name, _ in group]
    involved: list[Any] = []
    for (_, weight), layer in zip(group, owners, strict=True):
        if layer is None:
            involved.append(weight)
        else:
            involved.extend(layer.parameters())

    copy = Tensor.clone if partitioned else Tensor.detach
    merged: list[tuple[str, Tensor]] = []
    with GatheredParameters(involved, enabled=partitioned):
        for (name, weight), layer in zip(group, owners, strict=True):
            whole = copy(weight.detach()) if layer is None else _merged(weight, layer)
            merged.append((name.replace(".base_layer.", "."), whole))
    return merged


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    """Return ``weight`` with all active adapters of a peft ``layer``, summed in float32."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)
