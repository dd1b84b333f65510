"""Forwards of norms, gated MLPs and attention by liger-kernel's functions."""

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
"""Global name by which the attention of transformers calls its rotary embedding."""

ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, OSError, subprocess.SubprocessError)
"""Errors that kernels raise, besides triton's own."""


@dataclass(frozen=True)
class Kernels:
    """Autograd functions of ``liger_kernel.ops`` 0.8.5, with their arguments."""

    rms_norm: Any  # (x, weight, eps, offset, casting, in place)
    rotary: Any  # (queries, keys, cos, sin)
    silu_product: Any  # (gate, up)
    gelu_product: Any  # (gate, up), with tanh
    joined_silu_product: Any  # (gate and up side by side)


@cache
def load_kernels() -> Kernels:
    """Import the kernels: it takes seconds, and prints messages about backends, which are dropped."""
    dropped = io.StringIO()
    with contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped):
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
    """Errors of kernels that do not compile, or refuse shapes or arguments."""
    import triton

    return (*ERRORS, triton.TritonError)


def _backward_once(function: Any) -> Any:
    """Make a second backward an error: the first writes its gradients over the saved tensors."""
    # Looked up here, since torch.compile cannot look it up in a closure's class.
    backward_of_library = function.backward

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
    """Replace the forward of one module, not of its class; it reads ``settings`` from the module."""
    module.__dict__["fused_kernel"] = kind
    module.__dict__["fused_settings"] = settings
    module.__dict__["forward"] = types.MethodType(forward, module)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute an RMSNorm, from (..., H) to the same shape."""
    function, settings, device_type = self.fused_settings
    output: Tensor
    if hidden_states.device.type != device_type or hidden_states.dtype != self.weight.dtype:
        output = type(self).forward(self, hidden_states)
    else:
        # Not in place: that would change the gradient that a residual connection still needs.
        output = function.apply(hidden_states, self.weight, *settings, False)
    return output


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    """Compute an MLP with a gate, from (..., H) to the same shape."""
    function, _, device_type = self.fused_settings
    output: Tensor
    if x.device.type != device_type:
        output = type(self).forward(self, x)
    else:
        output = self.down_proj(function.apply(self.gate_proj(x), self.up_proj(x)))
    return output


def joined_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute an MLP with joined projections to gate and values (Phi-3), from (..., H) to the same shape."""
    function, _, device_type = self.fused_settings
    output: Tensor
    if hidden_states.device.type != device_type:
        output = type(self).forward(self, hidden_states)
    else:
        joined = self.gate_up_proj(hidden_states)
        # The kernel's gradient has two dimensions.
        rows = function.apply(joined.flatten(0, -2))
        output = self.down_proj(rows.unflatten(0, joined.shape[:-1]))
    return output


@cache
def with_rotary(forward: types.FunctionType, kernel: Any, device_type: str) -> types.FunctionType:
    """Copy an attention's ``forward`` with the kernel in place of its rotary embedding.

    The copy has the same code, but one of its global names has another value. Other models of the family, which share
    the original function, do not change.
    """
    plain = forward.__globals__[ROTARY_FUNCTION]
    names = {**forward.__globals__, ROTARY_FUNCTION: rotary_function(plain, kernel, device_type)}
    # Given the module's name, torch.compile would look up the plain function in that module.
    del names["__name__"]
    fused = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


@cache
def rotary_function(plain: Callable[..., Any], kernel: Any, device_type: str) -> Callable[..., Any]:
    """Wrap the kernel like ``plain``, which still handles other devices, and shapes that the kernel lacks."""

    def apply_rotary_pos_emb(
        queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        turns_whole_heads = cos.dim() == 3 and cos.shape[-1] == queries.shape[-1] == keys.shape[-1]
        is_one_dtype = queries.dtype == keys.dtype == cos.dtype
        fits = turns_whole_heads and is_one_dtype and queries.device.type == device_type
        if others or options or not fits or queries.numel() == 0:
            rotated: tuple[Tensor, Tensor] = plain(queries, keys, cos, sin, *others, **options)
            return rotated

        # Put all tokens in one row. If rows have one token each, torch calls any layout contiguous, and the kernel
        # would read wrong strides. The kernel also compiles once for each number of rows.
        rows, _, length, _ = queries.shape
        row_cos = cos.expand(rows, -1, -1).reshape(1, rows * length, -1)
        row_sin = sin.expand(rows, -1, -1).reshape(1, rows * length, -1)
        turned_queries, turned_keys = kernel.apply(
            _as_one_row(queries), _as_one_row(keys), row_cos, row_sin
        )
        return _as_rows(turned_queries, rows, length), _as_rows(turned_keys, rows, length)

    return apply_rotary_pos_emb


def _as_one_row(x: Tensor) -> Tensor:
    """Copy (B, H, L, D) to (1, H, B L, D); the kernel overwrites the copy."""
    rows, heads, length, _ = x.shape
    tokens = x.transpose(1, 2).reshape(1, rows * length, heads, -1)
    return tokens.clone().transpose(1, 2)


def _as_rows(x: Tensor, rows: int, length: int) -> Tensor:
    """View (1, H, B L, D) as (B, H, L, D)."""
    return x.transpose(1, 2).reshape(rows, length, x.shape[1], -1).transpose(1, 2)
