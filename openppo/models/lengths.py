"""torch's attention over rows of unequal lengths, in the form that the installed torch has, and its check.

Its kernel shares keys among heads, and reads parts of buffers, from torch 2.11 on, though ``varlen_attn`` of 2.11 has
no arguments for either.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from openppo import logger

_HAS_ARGUMENTS = "seqused_k" in inspect.signature(varlen.varlen_attn).parameters
_LARGEST_ERROR = 0.02
"""Of the largest value, in bfloat16: some three times what rounding leaves."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *documents: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.12, also with torch 2.11.

    ``query`` (T, H, D), ``key`` and ``value`` (T', G, D) to (T, H, D). ``documents`` are where those of queries begin
    and of keys, int32 (documents + 1,) each, and the tokens of the longest; ``seqused_k`` (documents,) says how many of
    their keys are read.
    """
    output: Any
    if _HAS_ARGUMENTS:
        more: dict[str, Any] = {
            "scale": scale,
            "window_size": window_size,
            "enable_gqa": enable_gqa,
            "seqused_k": seqused_k,
        }
        output = varlen.varlen_attn(query, key, value, *documents, **more)
    elif seqused_k is None:
        output = varlen.varlen_attn(
            query, key, value, *documents, scale=scale, window_size=window_size
        )
    else:
        output = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            *documents,
            dropout_p=0.0,
            is_causal=window_size == (-1, 0),
            return_debug_mask=False,
            scale=scale,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
            seqused_k=seqused_k,
        )[0]
    return output


_fails_elsewhere = False
"""Whether the check failed on another rank: all of them decide alike."""


def lengths_are_exact() -> bool:
    """Test for a GPU, if there is one, on which ``varlen_attn`` agrees with SDPA; a line in the log says why not."""
    return not _fails_elsewhere and _difference_here() is None


def decide_alike(everyones: list[bool]) -> None:
    """Use no lengths here if ``lengths_are_exact`` is false on one of the ranks."""
    global _fails_elsewhere
    if not all(everyones) and any(everyones):
        logger.warning(
            "samples are padded on all ranks: attention by lengths does not agree with SDPA on one of them."
        )
    _fails_elsewhere = not all(everyones)


@cache
def _difference_here() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return "no GPU with FlashAttention"
    difference = difference_from_sdpa(torch.device("cuda"))
    if difference is not None:
        logger.warning(
            "samples are padded, which is slower: attention by lengths of torch %s does not agree with SDPA on %s (%s)",
            torch.__version__,
            torch.cuda.get_device_name(),
            difference,
        )
    return difference


def difference_from_sdpa(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """What ``varlen_attn`` computes otherwise than SDPA in float32, on small rows; None if nothing.

    Rows of unequal lengths, heads that share keys, a window, gradients; and single queries over parts of a buffer.
    """
    try:
        for window in (None, 16):
            if (error := _error_of_rows(device, dtype, window)) > _LARGEST_ERROR:
                return f"rows with window {window}: wrong by {error:.2g} of the largest value"
            if (error := _error_of_decoding(device, dtype, window)) > _LARGEST_ERROR:
                return f"decoding with window {window}: wrong by {error:.2g} of the largest value"
    except RuntimeError as error:  # as torch's operators raise it
        return str(error).splitlines()[0]
    return None


def _error_of_rows(device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    """The largest error of outputs and gradients of packed rows, relative to the largest value."""
    n_tokens = [1, 70, 33]
    query, key, value, weights = _random(device, dtype, sum(n_tokens), heads=(4, 2, 2, 4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    starts = _starts(n_tokens, device)
    output = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        max(n_tokens),
        max(n_tokens),
        window_size=(_left(window), 0),
        enable_gqa=True,
    )
    exact_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    queries, keys, values = (tensor.split(n_tokens) for tensor in exact_inputs)
    exact = torch.cat(
        [_exact(*heads, window=window) for heads in zip(queries, keys, values, strict=True)]
    )

    gradients = torch.autograd.grad(output, inputs, weights)
    exact_gradients = torch.autograd.grad(exact, exact_inputs, weights.float())
    pairs = zip([output, *gradients], [exact, *exact_gradients], strict=True)
    return max(_relative_error(ours.detach(), expected.detach()) for ours, expected in pairs)


def _error_of_decoding(device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    """The largest error of single queries over the first keys of rows of a buffer."""
    n_keys, columns = [5, 96, 40], 128
    query = _random(device, dtype, len(n_keys), heads=(4,))[0]
    key, value = _random(device, dtype, len(n_keys) * columns, heads=(2, 2))
    output = varlen_attn(
        query,
        key,
        value,
        _starts([1] * len(n_keys), device),
        _starts([columns] * len(n_keys), device),
        1,
        columns,
        window_size=(-1, -1) if window is None else (_left(window), 0),
        enable_gqa=True,
        seqused_k=torch.tensor(n_keys, dtype=torch.int32, device=device),
    )
    rows = zip(
        query.float().split(1),
        key.float().split(columns),
        value.float().split(columns),
        n_keys,
        strict=True,
    )
    exact = torch.cat(
        [_exact(one, keys[:n], values[:n], window=window) for one, keys, values, n in rows]
    )
    return _relative_error(output, exact)


def _random(
    device: torch.device, dtype: torch.dtype, n_tokens: int, heads: tuple[int, ...]
) -> list[Tensor]:
    """Tensors (T, heads, 64), the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n_tokens, n, 64, generator=generator).to(device, dtype) for n in heads]


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _left(window: int | None) -> int:
    """Keys before a query's own, as the operator counts them."""
    return -1 if window is None else window - 1


def _exact(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last tokens of one document: (Q, H, D), (K, G, D) twice to (Q, H, D)."""
    places = torch.arange(len(key), device=key.device)
    distance = places[-len(query) :, None] - places
    seen = (distance >= 0) & (distance < (window or len(key)))
    key, value = (
        tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value)
    )
    queries, keys, values = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen
    ).transpose(0, 1)


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    """Infinite for what is no number."""
    error = (ours.float() - exact).abs().max() / exact.abs().max()
    return float(error.nan_to_num(torch.inf))
