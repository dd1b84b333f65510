"""One trained model: forward, backward with explicit boundaries, clipped optimizer step, schedule; its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, groupby
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import GatheredParameters, unwrap_model_for_generation
from torch import Tensor, nn

from openppo.strategy.launches import LaunchWatch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, by their names in its state."""
GATHERED_BYTES = 2**30
"""Of weights gathered together, and one more: each time waits for the device."""


class TrainableModel:
    """A DeepSpeed engine with the few operations that training loops need.

    Between two calls of ``step``, ``backward`` is called once for each micro-batch and the last call says
    ``last=True``. Losses are not scaled in any way; DeepSpeed averages gradients over ranks, so a loss that is a
    sum over this rank's share, divided by a total over all ranks, must be multiplied by the number of ranks.

    ``uncompiled`` is ``DeepspeedStrategy.uncompiled``.
    """

    merges_adapters = False
    """Whether ``gathered`` merges adapters, see ``DeepspeedStrategy.fits_merged``; not in lockstep."""

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
        self._host: dict[
            tuple[int, str], Tensor
        ] = {}  # offloaded moments: pinning each time anew would take long

    @property
    def module(self) -> nn.Module:
        """The module that was prepared."""
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

        A loss that is not finite makes the whole gradient NaN, which ``step`` sees on all ranks.
        """
        loss = loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)
        # Before the backward too: ZeRO-1 and 2 reduce gradients in hooks that ask for the boundary.
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss)
        self._launches.after_backward(last)

    def offload_adam_moments(self) -> None:
        """Move Adam's moments to the host; ``load_adam_moments`` must come before the next ``step``.

        DeepSpeed's ``offload_states`` needs ZeRO-1 or 2, or DeepSpeed's own Adam.
        """
        for key, state, name in self._adam_moments():
            moment = state[name]
            if key not in self._host:
                self._host[key] = torch.empty_like(moment, device="cpu", pin_memory=moment.is_cuda)
            state[name] = self._host[key].copy_(moment)

    def load_adam_moments(self) -> None:
        """Move Adam's moments back to where the weights are."""
        for key, state, name in self._adam_moments():
            if state[name] is self._host.get(key):
                state[name] = state[name].to(self.deepspeed.device, non_blocking=True, copy=True)

    def reset_adam(self) -> None:
        """Zero Adam's moments and count of steps, as of a fresh one; weights and schedule stay. On all ranks alike.

        It may be called wherever the moments are. GLM-5 (arXiv 2602.15763) does so when its engines get new weights.
        """
        for _, state, name in self._adam_moments():
            state[name].zero_()
            state["step"] = 0 * state["step"]  # a tensor, or a number of DeepSpeed's Adam

    def _adam_moments(self) -> list[tuple[tuple[int, str], dict[str, Tensor], str]]:
        """Key, owner and name of each moment that Adam has made."""
        adam: Any = self.deepspeed.basic_optimizer
        states = enumerate(adam.state.values())
        return [
            ((number, name), state, name)
            for number, state in states
            for name in MOMENTS
            if name in state
        ]

    def step(self) -> float:
        """Clip, update, advance the schedule. Returns the gradient's L2 norm before clipping.

        When that is not finite, on all ranks alike, neither weights nor optimizer nor schedule change.
        """
        if (
            self.deepspeed.zero_optimization_stage() == 0
        ):  # DeepSpeed neither reports a norm there nor skips a step
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

    @contextmanager
    def gathered(self, in_lockstep: bool = False) -> Iterator[None]:
        """Inside, the module may be called, its layers uncompiled: by each rank alone, or by all together in lockstep.

        Under ZeRO-3 it has whole weights and no hooks, unless in lockstep. All ranks enter together.
        """
        whole = self.deepspeed.zero_optimization_stage() == 3 and not in_lockstep
        merging = self.merges_adapters and not in_lockstep
        with (
            unwrap_model_for_generation(self.deepspeed) if whole else nullcontext(),
            adapters_merged(self.module) if merging else nullcontext(),
            self._uncompiled(),
        ):
            yield

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """``merged_weights`` of the policy; all ranks together."""
        policy: Any = self.module
        return merged_weights(policy.model)


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Layers of PEFT with adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # seconds of imports

    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)
    }


@contextmanager
def adapters_merged(module: nn.Module) -> Iterator[None]:
    """Inside, adapters are merged into the weights, which are bit for bit as before afterwards.

    Weights keep their addresses, which recorded decode steps read.
    """
    kept: dict[Any, Tensor] = {}
    try:
        for layer in adapted_layers(module).values():
            weight = layer.base_layer.weight.data
            kept[layer] = weight.clone()
            weight.copy_(_merged(weight, layer))
            layer.merged_adapters = list(
                layer.active_adapters
            )  # forwards of peft leave them out then
        yield
    finally:
        for layer, before in kept.items():
            layer.base_layer.weight.data.copy_(before)
            layer.merged_adapters = []


def merged_weights(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and whole weight, one by one, of a Hugging Face or PEFT model with adapters added; nothing changes.

    Under ZeRO-3 they are gathered about 1 GiB at a time, and copied.
    """
    model: nn.Module = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    layers = adapted_layers(model)
    adapters = {
        f"{name}.{inner}" for name, layer in layers.items() for inner, _ in layer.named_parameters()
    }
    weights: list[Any] = [
        (n, p) for n, p in model.named_parameters() if n not in adapters or ".base_layer." in n
    ]
    partitioned = any(hasattr(p, "ds_id") for _, p in weights)
    sizes = (p.ds_numel * p.element_size() if partitioned else GATHERED_BYTES for _, p in weights)
    numbered = zip(accumulate(sizes, initial=0), weights, strict=False)
    for _, together in groupby(numbered, lambda each: each[0] // GATHERED_BYTES):
        group = [
            (name, p, layers.get(name.removesuffix(".base_layer.weight")))
            for _, (name, p) in together
        ]
        involved = [
            p
            for _, weight, layer in group
            for p in ([weight] if layer is None else layer.parameters())
        ]
        with GatheredParameters(involved, enabled=partitioned):
            copy = Tensor.clone if partitioned else Tensor.detach
            whole = [
                copy(p.detach()) if layer is None else _merged(p, layer) for _, p, layer in group
            ]
        yield from zip(
            (name.replace(".base_layer.", ".") for name, *_ in group), whole, strict=True
        )
        del whole  # before the next are gathered


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    """``weight`` with all active adapters of a peft ``layer``, summed in float32."""
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()
    return total.to(weight.dtype)
