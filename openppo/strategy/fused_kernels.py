"""RMSNorm, rotary embedding and gated MLP in one kernel each, by liger-kernel, on GPUs where it is installed.

Kernels are bound to modules of one model, and only where they agree with the module: outputs and gradients, of prompts
and of single tokens. liger-kernel's own functions replace classes of the whole process, and do not look at activations.
"""

import copy
import importlib.util
import itertools
import math
import types
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openppo import logger
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
from openppo.types import Comm

NORM = "RMSNorm"
ROTARY = "rotary embedding"
MLP = "gated MLP"
_LARGEST_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Norm of the difference over that of the plain module's output or gradient; rounding leaves less than a third."""
_SHAPES = ((2, 7), (3, 1))
"""Rows and tokens of what modules are compared on: prompts, and a decode step."""
_NARROW = 256
_MANY_ROWS = 2**15
"""liger-kernel has another kernel for so many rows of narrow norms, such as those of heads."""
Choices = dict[str, tuple[Any, ...] | None]


def has_kernels(device: torch.device, comm: Comm) -> bool:
    """Test for GPUs and the packages of their kernels, on all ranks. Collective on GPUs."""
    if device.type != "cuda":
        return False
    is_installed = all(map(importlib.util.find_spec, ("liger_kernel", "triton")))
    if all(comm.all_gather_object(is_installed)):
        return True
    missing = "" if is_installed else ": install liger-kernel (pip install 'openppo[gpu]')"
    logger.info(
        "fused kernels: none, so norms and activations take several kernels each%s", missing
    )
    return False


def fuse_kernels(module: nn.Module, device: torch.device, comm: Comm) -> Counter[str]:
    """Bind kernels to the modules of ``module`` that they agree with; returns their number by kind. Collective.

    Tensors on other devices than ``device`` go to the plain module. Names and values of parameters stay.
    """
    modules = [(_binding_of(child), child) for child in module.modules()]
    bindings = {binding.name: binding for binding, _ in modules if binding is not None}
    choices: Choices = {name: binding.choose(device) for name, binding in sorted(bindings.items())}
    everyones = comm.all_gather_object(choices)
    agreed = dict(choices)
    for of_rank in everyones:
        agreed = {name: choice for name, choice in agreed.items() if of_rank.get(name) == choice}

    counts = Counter[str]()
    for binding, child in modules:
        if binding is not None and (choice := agreed.get(binding.name)) is not None:
            binding.bind(child, choice, device.type)
            counts[binding.kind] += 1
    plain = [
        f"{name} ({binding.reason or 'differs on another rank'})"
        for name, binding in bindings.items()
        if agreed.get(name) is None
    ]
    names = (
        type(child).__name__ for child in module.modules() if hasattr(type(child), "config_class")
    )
    _log(next(names, type(module).__name__), counts, plain)
    return counts


def fused_in(module: nn.Module) -> list[str]:
    """Kinds of kernels that are bound to modules of ``module``."""
    return sorted(
        {vars(child)["fused_kernel"] for child in module.modules() if "fused_kernel" in vars(child)}
    )


def _log(model: str, counts: Counter[str], plain: Sequence[str]) -> None:
    if counts:
        bound = ", ".join(f"{kind} ({n})" for kind, n in sorted(counts.items()))
        left = f"; as they were: {', '.join(plain)}" if plain else ""
        logger.info("fused kernels in %s: %s%s", model, bound, left)
    else:
        reasons = f": {', '.join(plain)}" if plain else ""
        logger.info(
            "fused kernels: %s stays as it is, as none computes a part of it alike%s",
            model,
            reasons,
        )


class _Binding(ABC):
    """A module, with the ways in which a kernel may compute what it does."""

    kind = ""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, f"{self.kind} of {name}"
        self.reason = ""
        """Why no candidate was chosen."""

    @abstractmethod
    def candidates(self) -> Sequence[tuple[Any, ...]]:
        """Settings of the kernel that may be the module's."""

    @abstractmethod
    def compare(self, settings: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> float:
        """The largest error of outputs and gradients, see ``_LARGEST_ERRORS``."""

    @abstractmethod
    def bind(self, module: nn.Module, settings: tuple[Any, ...], device_type: str) -> None:
        """Have ``module`` compute by the kernel on devices of that type."""

    def choose(self, device: torch.device) -> tuple[Any, ...] | None:
        """The settings with the least error, if that is small in both dtypes."""
        errors = {}
        for settings in self.candidates():
            worst = 0.0
            for dtype, most in _LARGEST_ERRORS.items():
                worst = max(worst, self._error(settings, device, dtype) / most)
            errors[settings] = worst
        best = min(errors, key=errors.__getitem__)
        if errors[best] <= 1:
            return best
        if errors[best] < math.inf:
            self.reason = f"differs by {errors[best]:.2g} times what rounding may leave"
        return None

    def _error(self, settings: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> float:
        generator_state = torch.random.get_rng_state()
        try:
            torch.manual_seed(0)  # random numbers are drawn on the host
            return self.compare(settings, device, dtype)
        except kernel_errors() as error:
            self.reason = (
                str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            )
            return math.inf
        finally:
            torch.random.set_rng_state(generator_state)


class _Norm(_Binding):
    kind = NORM

    def __init__(self, module: nn.Module) -> None:
        self.width = _size_of(module.weight)
        self.eps_name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
        super().__init__(module, f"{type(module).__qualname__}, {self.width} wide")

    def candidates(self) -> Sequence[tuple[Any, ...]]:
        eps = float(getattr(self.module, self.eps_name))
        return [(eps, 0.0, "llama"), (eps, 0.0, "gemma"), (eps, 1.0, "gemma")]

    def compare(self, settings: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> float:
        weight = (1 + torch.randn(self.width) / 4).to(device, dtype)
        probe = _copy_of(self.module)
        errors = []
        shapes: list[tuple[int, ...]] = [(*shape, self.width) for shape in _SHAPES]
        shapes.append((2, 5, 3, self.width))  # of the heads of each token
        if device.type == "cuda" and self.width <= _NARROW:
            shapes.append((_MANY_ROWS, self.width))
        for shape, scale in itertools.product(shapes, (1.0, 1e-3)):  # and near its epsilon
            x = scale * _random(shape, device, dtype)
            out = _random(shape, device, dtype)
            parameter = nn.Parameter(weight.clone())
            probe._parameters = {"weight": parameter}

            def kernel(x: Tensor, parameter: nn.Parameter = parameter) -> Tensor:
                return load_kernels().rms_norm.apply(x, parameter, *settings, False)

            errors.append(
                _difference(
                    type(self.module).forward.__get__(probe),
                    kernel,
                    [x],
                    parameters=[parameter],
                    weights=[out],
                )
            )
        return max(errors)

    def bind(self, module: nn.Module, settings: tuple[Any, ...], device_type: str) -> None:
        attach(
            module,
            norm_forward,
            self.kind,
            settings=(load_kernels().rms_norm, settings, device_type),
        )


class _MLP(_Binding):
    kind = MLP

    def __init__(self, module: nn.Module) -> None:
        self.joined = hasattr(module, "gate_up_proj")
        self.activation = "activation_fn" if self.joined else "act_fn"
        activation = type(getattr(module, self.activation)).__name__
        super().__init__(module, f"{type(module).__qualname__}, {activation}")

    def candidates(self) -> Sequence[tuple[Any, ...]]:
        return [("joined_silu_product",)] if self.joined else [("silu_product",), ("gelu_product",)]

    def compare(self, settings: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> float:
        probe = _copy_of(self.module)
        activation = {self.activation: getattr(self.module, self.activation)}
        if self.joined:
            probe._modules = {"gate_up_proj": _Scale(1.5), "down_proj": _Scale(2.0), **activation}
        else:
            scales = {"gate_proj": _Scale(1.5), "up_proj": _Scale(-0.75), "down_proj": _Scale(2.0)}
            probe._modules = {**scales, **activation}
        forward = type(self.module).forward
        fused = _copy_of(probe)
        self.bind(fused, settings, device.type)
        errors = []
        for shape in _SHAPES:
            x, out = (_random((*shape, 64), device, dtype) for _ in range(2))
            out = out[..., :32] if self.joined else out
            errors.append(
                _difference(
                    forward.__get__(probe), fused.forward, [x], parameters=[], weights=[out]
                )
            )
        return max(errors)

    def bind(self, module: nn.Module, settings: tuple[Any, ...], device_type: str) -> None:
        function = getattr(load_kernels(), settings[0])
        forward = joined_mlp_forward if self.joined else mlp_forward
        attach(module, forward, self.kind, settings=(function, settings, device_type))


class _Rotary(_Binding):
    kind = ROTARY

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, type(module).__qualname__)

    def candidates(self) -> Sequence[tuple[Any, ...]]:
        return [()]

    def compare(self, settings: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> float:
        plain = type(self.module).forward.__globals__[ROTARY_FUNCTION]
        fused = rotary_function(plain, load_kernels().rotary, device.type)
        head_dim = int(getattr(self.module, "head_dim", 64))
        errors = []
        for (rows, length), by_heads in [
            (shape, by_heads) for shape in _SHAPES for by_heads in (False, True)
        ]:
            heads = []
            for n_heads in (4, 2):
                states = _random((rows, length, n_heads, head_dim), device, dtype).transpose(
                    1, 2
                )  # (B, H, L, D)
                heads.append(
                    states.contiguous() if by_heads else states
                )  # as after a norm of each head
            angles = torch.rand(rows, length, head_dim // 2).repeat(1, 1, 2) * 7
            limits = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
            outs = [_random(tuple(states.shape), device, dtype) for states in heads]

            def rotate(
                *states: Tensor, by: Any = plain, limits: tuple[Tensor, Tensor] = limits
            ) -> Any:
                return by(*states, *limits)

            errors.append(
                _difference(
                    rotate,
                    lambda *states, rotate=rotate: rotate(*states, by=fused),
                    heads,
                    parameters=[],
                    weights=outs,
                )
            )
        return max(errors)

    def bind(self, module: nn.Module, settings: tuple[Any, ...], device_type: str) -> None:
        forward = with_rotary(type(module).forward, load_kernels().rotary, device_type)
        attach(module, forward, self.kind, settings=None)


def _binding_of(module: nn.Module) -> _Binding | None:
    """Where a kernel may do what the module does."""
    kind = type(module)
    if "forward" in vars(module):  # somebody else's
        return None
    if kind.__name__.endswith("RMSNorm") and isinstance(
        getattr(module, "weight", None), nn.Parameter
    ):
        return (
            _Norm(module) if hasattr(module, "variance_epsilon") or hasattr(module, "eps") else None
        )
    names = set(dict(module.named_children()))
    if {"gate_proj", "up_proj", "down_proj", "act_fn"} <= names or {
        "gate_up_proj",
        "down_proj",
        "activation_fn",
    } <= names:
        return _MLP(module)
    forward = kind.forward
    calls_rotary = (
        isinstance(forward, types.FunctionType) and ROTARY_FUNCTION in forward.__code__.co_names
    )
    has_sections = "mrope_section" in str(
        getattr(getattr(module, "config", None), "rope_parameters", "")
    )
    # Angles of sections differ between both halves of a head, of which the kernel reads one.
    return (
        _Rotary(module)
        if calls_rotary and ROTARY_FUNCTION in forward.__globals__ and not has_sections
        else None
    )


class _Scale(nn.Module):
    """Stands for a projection."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def _copy_of(module: nn.Module) -> Any:
    """A shallow copy without hooks, such as those that gather weights."""
    probe = copy.copy(module)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(probe)[name] = {}
    return probe


def _size_of(parameter: Any) -> int:
    """Elements of a vector, whole where ZeRO-3 has partitioned it."""
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
    """The largest relative difference of outputs and gradients."""
    results = []
    for function in (plain, fused):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            outputs = function(
                *(leaf * 1 for leaf in leaves)
            )  # kernels may write into what they get
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            total = sum(
                (output * weight).sum() for output, weight in zip(outputs, weights, strict=True)
            )
            gradients = torch.autograd.grad(total, [*leaves, *parameters])
        results.append([x.detach().float() for x in (*outputs, *gradients)])
    return max(_relative(ours, expected) for expected, ours in zip(*results, strict=True))


def _relative(ours: Tensor, expected: Tensor) -> float:
    error = float((ours - expected).norm() / expected.norm().clamp_min(1e-12))
    return math.inf if math.isnan(error) else error
