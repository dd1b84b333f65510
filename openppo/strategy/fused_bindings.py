"""Modules that a kernel may compute, and their comparison with the kernel."""

import copy
import itertools
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from openppo.strategy.fused_forwards import (
    ROTARY_FUNCTION,
    attach,
    joined_mlp_forward,
    kernel_errors,
    load_kernels,
    mlp_forward,
    norm_forward,
    rotary_function,
    with_rotary,
)

Settings = tuple[Any, ...]
"""Arguments of a kernel other than tensors, or the name of its function."""

NORM = "RMSNorm"
ROTARY = "rotary embedding"
MLP = "gated MLP"
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_JOINED_MLP_PARTS = {"gate_up_proj", "down_proj", "activation_fn"}

_LARGEST_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Largest norm of the difference, divided by the norm of the plain output or gradient.

Rounding errors stay below a third of this.
"""
_SHAPES = ((2, 7), (3, 1))
"""Rows and tokens for the comparison of modules: prompts, and a decode step."""
_NARROW = 256
"""Width of norms that are also compared on many rows."""
_MANY_ROWS = 2**15
"""Number of rows for which liger-kernel has another kernel of narrow norms, such as those of heads."""


class Binding(ABC):
    """A module, with the ways in which a kernel may compute it."""

    kind = ""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = f"{self.kind} of {name}"
        self.reason = ""
        """Reason why no candidate was chosen."""

    @abstractmethod
    def candidates(self) -> Sequence[Settings]:
        """Settings with which the kernel may match the module."""

    @abstractmethod
    def compare(self, settings: Settings, device: torch.device, dtype: torch.dtype) -> float:
        """Return the largest error of outputs and gradients, see ``_LARGEST_ERRORS``."""

    @abstractmethod
    def bind(self, module: nn.Module, settings: Settings, device_type: str) -> None:
        """Have ``module`` compute by the kernel on devices of that type."""

    def choose(self, device: torch.device) -> Settings | None:
        """Return the settings with the least error, if it is small in both dtypes."""
        errors = {}
        for settings in self.candidates():
            worst = 0.0
            for dtype, limit in _LARGEST_ERRORS.items():
                worst = max(worst, self._error(settings, device, dtype) / limit)
            errors[settings] = worst

        best = min(errors, key=errors.__getitem__)
        if errors[best] <= 1:
            return best
        if errors[best] < math.inf:
            self.reason = f"differs by {errors[best]:.2g} times what rounding may leave"
        return None

    def _error(self, settings: Settings, device: torch.device, dtype: torch.dtype) -> float:
        """Return the error for the same random numbers each time; infinite if the kernel fails."""
        generator_state = torch.random.get_rng_state()
        try:
            torch.manual_seed(0)  # random numbers are drawn on the host
            return self.compare(settings, device, dtype)
        except kernel_errors() as error:
            lines = str(error).strip().splitlines()
            self.reason = lines[-1] if lines else type(error).__name__
            return math.inf
        finally:
            torch.random.set_rng_state(generator_state)


class _Norm(Binding):
    """RMSNorm that scales by its weight, or by its weight plus an offset of 1."""

    kind = NORM

    def __init__(self, module: nn.Module) -> None:
        self.width = _size_of(module.weight)
        self.eps_name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
        super().__init__(module, f"{type(module).__qualname__}, {self.width} wide")

    def candidates(self) -> Sequence[Settings]:
        eps = float(getattr(self.module, self.eps_name))
        return [(eps, 0.0, "llama"), (eps, 0.0, "gemma"), (eps, 1.0, "gemma")]

    def compare(self, settings: Settings, device: torch.device, dtype: torch.dtype) -> float:
        weight = (1 + torch.randn(self.width) / 4).to(device, dtype)
        probe = _copy_of(self.module)
        plain = type(self.module).forward.__get__(probe)
        shapes: list[tuple[int, ...]] = [(*shape, self.width) for shape in _SHAPES]
        shapes.append((2, 5, 3, self.width))  # the heads of each token
        if device.type == "cuda" and self.width <= _NARROW:
            shapes.append((_MANY_ROWS, self.width))

        errors = []
        for shape, scale in itertools.product(shapes, (1.0, 1e-3)):  # 1e-3 is near epsilon
            x = scale * _random(shape, device, dtype)
            weights = [_random(shape, device, dtype)]
            parameter = nn.Parameter(weight.clone())
            probe._parameters = {"weight": parameter}
            fused = partial(_fused_norm, parameter=parameter, settings=settings)
            error = _difference(plain, fused, [x], parameters=[parameter], weights=weights)
            errors.append(error)
        return max(errors)

    def bind(self, module: nn.Module, settings: Settings, device_type: str) -> None:
        function = load_kernels().rms_norm
        attach(module, norm_forward, self.kind, settings=(function, settings, device_type))


def _fused_norm(x: Tensor, parameter: nn.Parameter, settings: Settings) -> Tensor:
    output: Tensor = load_kernels().rms_norm.apply(x, parameter, *settings, False)
    return output


class _MLP(Binding):
    """MLP with a gate; its projections to gate and values are separate or joined."""

    kind = MLP

    def __init__(self, module: nn.Module) -> None:
        self.joined = hasattr(module, "gate_up_proj")
        self.activation = "activation_fn" if self.joined else "act_fn"
        activation = type(getattr(module, self.activation)).__name__
        super().__init__(module, f"{type(module).__qualname__}, {activation}")

    def candidates(self) -> Sequence[Settings]:
        if self.joined:
            return [("joined_silu_product",)]
        return [("silu_product",), ("gelu_product",)]

    def compare(self, settings: Settings, device: torch.device, dtype: torch.dtype) -> float:
        probe = self._probe()
        plain = type(self.module).forward.__get__(probe)
        fused = _copy_of(probe)
        self.bind(fused, settings, device.type)

        errors = []
        for shape in _SHAPES:
            x = _random((*shape, 64), device, dtype)
            weights = _random((*shape, 64), device, dtype)
            if self.joined:
                weights = weights[..., :32]
            error = _difference(plain, fused.forward, [x], parameters=[], weights=[weights])
            errors.append(error)
        return max(errors)

    def _probe(self) -> Any:
        """Copy the module, with factors in place of its projections."""
        probe = _copy_of(self.module)
        parts: dict[str, Any] = {}
        if self.joined:
            parts["gate_up_proj"] = _Scale(1.5)
        else:
            parts["gate_proj"] = _Scale(1.5)
            parts["up_proj"] = _Scale(-0.75)
        parts["down_proj"] = _Scale(2.0)
        parts[self.activation] = getattr(self.module, self.activation)
        probe._modules = parts
        return probe

    def bind(self, module: nn.Module, settings: Settings, device_type: str) -> None:
        function = getattr(load_kernels(), settings[0])
        forward = joined_mlp_forward if self.joined else mlp_forward
        attach(module, forward, self.kind, settings=(function, settings, device_type))


class _Rotary(Binding):
    """Attention that calls a rotary embedding."""

    kind = ROTARY

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, type(module).__qualname__)

    def candidates(self) -> Sequence[Settings]:
        return [()]

    def compare(self, settings: Settings, device: torch.device, dtype: torch.dtype) -> float:
        plain = type(self.module).forward.__globals__[ROTARY_FUNCTION]
        fused = rotary_function(plain, load_kernels().rotary, device.type)
        head_dim = int(getattr(self.module, "head_dim", 64))

        errors = []
        for (rows, length), by_heads in itertools.product(_SHAPES, (False, True)):
            states = []
            for n_heads in (4, 2):
                by_tokens = _random((rows, length, n_heads, head_dim), device, dtype)
                heads = by_tokens.transpose(1, 2)  # (B, H, L, D)
                # A norm over each head leaves the heads one after the other in memory.
                states.append(heads.contiguous() if by_heads else heads)

            angles = torch.rand(rows, length, head_dim // 2).repeat(1, 1, 2) * 7
            cos = angles.cos().to(device, dtype)
            sin = angles.sin().to(device, dtype)
            weights = [_random(tuple(heads.shape), device, dtype) for heads in states]
            error = _difference(
                partial(_rotate, plain, cos, sin),
                partial(_rotate, fused, cos, sin),
                states,
                parameters=[],
                weights=weights,
            )
            errors.append(error)
        return max(errors)

    def bind(self, module: nn.Module, settings: Settings, device_type: str) -> None:
        forward = with_rotary(type(module).forward, load_kernels().rotary, device_type)
        attach(module, forward, self.kind, settings=None)


def _rotate(function: Callable[..., Any], cos: Tensor, sin: Tensor, *states: Tensor) -> Any:
    return function(*states, cos, sin)


def binding_of(module: nn.Module) -> Binding | None:
    """Return the binding of a module that a kernel may compute, else None."""
    if "forward" in vars(module):  # replaced by other code
        return None

    is_norm = type(module).__name__.endswith("RMSNorm")
    if is_norm and isinstance(getattr(module, "weight", None), nn.Parameter):
        has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
        return _Norm(module) if has_eps else None

    parts = set(dict(module.named_children()))
    if parts >= _MLP_PARTS or parts >= _JOINED_MLP_PARTS:
        return _MLP(module)
    if _calls_rotary(module):
        return _Rotary(module)
    return None


def _calls_rotary(module: nn.Module) -> bool:
    """True if the module's forward calls a rotary embedding that the kernel can compute."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType):
        return False
    is_called = ROTARY_FUNCTION in forward.__code__.co_names
    if not is_called or ROTARY_FUNCTION not in forward.__globals__:
        return False
    # With sections, the angles of the two halves of a head differ, but the kernel reads only one half.
    config = getattr(module, "config", None)
    return "mrope_section" not in str(getattr(config, "rope_parameters", ""))


class _Scale(nn.Module):
    """Stand-in for a projection."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def _copy_of(module: nn.Module) -> Any:
    """Copy a module shallowly, without hooks such as those that gather weights."""
    probe = copy.copy(module)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(probe)[name] = {}
    return probe


def _size_of(parameter: Any) -> int:
    """Count the elements of a vector, even of one that ZeRO-3 has partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def _difference(
    plain: Callable[..., Any],
    fused: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> float:
    """Return the largest relative difference of outputs and gradients."""
    results = []
    for function in (plain, fused):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            # Kernels may write into their inputs, so these are copies.
            outputs = function(*(leaf * 1 for leaf in leaves))
            if not isinstance(outputs, tuple):
                outputs = (outputs,)
            pairs = zip(outputs, weights, strict=True)
            total = sum((output * weight).sum() for output, weight in pairs)
            gradients = torch.autograd.grad(total, [*leaves, *parameters])
        results.append([x.detach().float() for x in (*outputs, *gradients)])

    expected, ours = results
    return max(map(_relative_error, ours, expected))


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    """Norm of the difference, divided by that of ``expected``; infinite if it is NaN."""
    error = float((ours - expected).norm() / expected.norm().clamp_min(1e-12))
    return math.inf if math.isnan(error) else error
