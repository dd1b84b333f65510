"""Forwards of norms, gated MLPs and attention by liger-kernel's functions, and how a module gets one of them."""

import contextlib
import io
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""The global name by which attention of transformers calls it."""


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
        silu_product=ops.LigerSiLUMulFunction,
        gelu_product=ops.LigerGELUMulFunction,
        joined_silu_product=LigerFusedGateUpSiLUMulFunction,
    )


def attach(module: nn.Module, forward: Callable[..., Any], kind: str, settings: Any) -> None:
    module.__dict__["fused_kernel"] = kind
    module.__dict__["fused_settings"] = settings
    module.__dict__["forward"] = types.MethodType(forward, module)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    function, settings, device_type = self.fused_settings
    if hidden_states.device.type != device_type or hidden_states.dtype != self.weight.dtype:
        output: Tensor = type(self).forward(self, hidden_states)
    else:  # not in place: it would change the gradient that a residual connection still needs
        output = function.apply(hidden_states, self.weight, *settings, False)
    return output


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    function, _, device_type = self.fused_settings
    if x.device.type != device_type:
        output: Tensor = type(self).forward(self, x)
    else:
        output = self.down_proj(_product(function, self.gate_proj(x), self.up_proj(x)))
    return output


def _joinedmlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    function, _, device_type = self.fused_settings
    if hidden_states.device.type != device_type:
        output: Tensor = type(self).forward(self, hidden_states)
    else:
        output = self.down_proj(function.apply(self.gate_up_proj(hidden_states)))
    return output


def _product(function: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Activation of ``gate``, times ``up``; the kernel's backward writes into both, so that it can run only once."""
    output: Tensor = function.apply(gate, up)
    return output


@cache
def with_rotary(forward: types.FunctionType, kernel: Any, device_type: str) -> types.FunctionType:
    """An attention's ``forward`` whose rotary embedding is the kernel's: the same code with one other global name.

    So no other model of the family changes, which share the function of their module.
    """
    plain = forward.__globals__[ROTARY_FUNCTION]
    names = {**forward.__globals__, ROTARY_FUNCTION: rotary_function(plain, kernel, device_type)}
    fused = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


@cache
def rotary_function(plain: Callable[..., Any], kernel: Any, device_type: str) -> Callable[..., Any]:
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
