"""Forwards of norms, gated MLPs and attention by liger-kernel's functions, and how a module gets one of them."""

import contextlib
import io
import subprocess
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""The global name by which attention of transformers calls it."""


ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Kernels:
    """Autograd functions of ``liger_kernel.ops`` 0.8.5, by what they compute."""

    rms_norm: Any  # (x, weight, eps, offset, casting, in place)
    rotary: Any  # (queries, keys, cos, sin)
    silu_product: Any  # (gate, up)
    gelu_product: Any  # (gate, up), with tanh
    joined_silu_product: Any  # (gate and up side by side)


@cache
def load_kernels() -> Kernels:
    """Import them: seconds, and messages about backends, which are left out."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from liger_kernel import ops
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return Kernels(
        rms_norm=ops.LigerRMSNormFunction,
        rotary=ops.LigerRopeFunction,
        silu_product=_backward_once(ops.LigerSiLUMulFunction),
        gelu_product=_backward_once(ops.LigerGELUMulFunction),
        joined_silu_product=LigerFusedGateUpSiLUMulFunction,
    )


def kernel_errors() -> tuple[type[Exception], ...]:
    """Errors of kernels that do not compile, or do not take shapes or arguments."""
    import triton

    return (*ERRORS, triton.TritonError)


def _backward_once(function: Any) -> Any:
    """The function, whose backward writes gradients over what it has saved, so that a second one is an error."""

    backward_of_library = (
        function.backward
    )  # which torch.compile cannot look up in a closure's class

    class Once(function):
        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            saved = ctx.saved_tensors
            result = backward_of_library(ctx, *gradients)
            if not torch.compiler.is_compiling():
                torch.autograd.graph.increment_version(saved)
            return result

    return Once


def attach(module: nn.Module, forward: Callable[..., Any], kind: str, settings: Any) -> None:
    """Give one module, not its class, that forward, which reads ``settings`` from it."""
    module.__dict__["fused_kernel"] = kind
    module.__dict__["fused_settings"] = settings
    module.__dict__["forward"] = types.MethodType(forward, module)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Of an RMSNorm, (..., H) to the same."""
    function, settings, device_type = self.fused_settings
    if hidden_states.device.type != device_type or hidden_states.dtype != self.weight.dtype:
        output: Tensor = type(self).forward(self, hidden_states)
    else:  # not in place: it would change the gradient that a residual connection still needs
        output = function.apply(hidden_states, self.weight, *settings, False)
    return output


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """Of an MLP with a gate, (..., H) to the same."""
    function, _, device_type = self.fused_settings
    if x.device.type != device_type:
        output: Tensor = type(self).forward(self, x)
    else:
        output = self.down_proj(function.apply(self.gate_proj(x), self.up_proj(x)))
    return output


def joined_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Of one whose projections to gate and values are joined, as Phi-3's."""
    function, _, device_type = self.fused_settings
    if hidden_states.device.type != device_type:
        output: Tensor = type(self).forward(self, hidden_states)
    else:
        joined = self.gate_up_proj(hidden_states)
        rows = function.apply(
            joined.flatten(0, -2)
        )  # whose gradient has no more dimensions than that
        output = self.down_proj(rows.unflatten(0, joined.shape[:-1]))
    return output


@cache
def with_rotary(forward: types.FunctionType, kernel: Any, device_type: str) -> types.FunctionType:
    """An attention's ``forward`` whose rotary embedding is the kernel's: the same code with one other global name.

    So no other model of the family changes, which share the function of their module.
    """
    plain = forward.__globals__[ROTARY_FUNCTION]
    names = {**forward.__globals__, ROTARY_FUNCTION: rotary_function(plain, kernel, device_type)}
    del names["__name__"]  # by which torch.compile would look for the plain function in its module
    fused = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


@cache
def rotary_function(plain: Callable[..., Any], kernel: Any, device_type: str) -> Callable[..., Any]:
    """The kernel in the form of ``plain``, which gets tensors on other devices, and shapes that the kernel lacks."""

    def apply_rotary_pos_emb(
        queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        whole = cos.dim() == 3 and cos.shape[-1] == queries.shape[-1] == keys.shape[-1]
        alike = queries.dtype == keys.dtype == cos.dtype and queries.device.type == device_type
        if others or options or not whole or not alike or queries.numel() == 0:
            rotated: tuple[Tensor, Tensor] = plain(queries, keys, cos, sin, *others, **options)
            return rotated

        # As one row of all tokens. Of one token a row torch calls any layout contiguous, and the kernel would read
        # wrong distances; and it compiles once for each number of rows.
        rows, _, length, _ = queries.shape
        states = [_as_one_row(x) for x in (queries, keys)]
        angles = [x.expand(rows, -1, -1).reshape(1, rows * length, -1) for x in (cos, sin)]
        one, other = kernel.apply(*states, *angles)
        return _as_rows(one, rows, length), _as_rows(other, rows, length)

    return apply_rotary_pos_emb


def _as_one_row(x: Tensor) -> Tensor:
    """(B, H, L, D) as (1, H, B L, D), which is a copy: the kernel writes there."""
    rows, heads, length, _ = x.shape
    return x.transpose(1, 2).reshape(1, rows * length, heads, -1).clone().transpose(1, 2)


def _as_rows(x: Tensor, rows: int, length: int) -> Tensor:
    """(1, H, B L, D) as (B, H, L, D)."""
    return x.transpose(1, 2).reshape(rows, length, x.shape[1], -1).transpose(1, 2)
