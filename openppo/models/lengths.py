"""torch's attention over rows of unequal lengths, for torch 2.11 and later, and its check.

The kernel of torch 2.11 shares keys among heads, and reads parts of buffers, but its ``varlen_attn`` has no arguments
for either.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

from openppo import logger

_HAS_ARGUMENTS = "seqused_k" in inspect.signature(varlen.varlen_attn).parameters
_LARGEST_ERROR = 0.02
"""Largest error in bfloat16, relative to the largest value: about three times the rounding error."""


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
    """Attend as ``torch.nn.attention.varlen.varlen_attn`` of torch 2.12, also with torch 2.11.

    ``query`` (T, H, D), ``key`` and ``value`` (T', G, D) to (T, H, D). ``documents`` are four values: the places where
    documents begin, among queries and among keys, int32 (documents + 1,) each; and the number of tokens of the longest
    document, again among both. With ``seqused_k`` (documents,) only the first that many keys of each document are read.
    """
    output: Any
    if _HAS_ARGUMENTS:
        output = varlen.varlen_attn(
            query,
            key,
            value,
            *documents,
            scale=scale,
            window_size=window_size,
            enable_gqa=enable_gqa,
            seqused_k=seqused_k,
        )
    elif seqused_k is None:
        output = varlen.varlen_attn(
            query, key, value, *documents, scale=scale, window_size=window_size
        )
    else:
        output, *_ = torch.ops.aten._flash_attention_forward(
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
        )
    return output


_fails_elsewhere = False
"""True if the check failed on any rank, so that all ranks decide alike."""


def lengths_are_exact() -> bool:
    """True for a GPU on which ``varlen_attn`` agrees with SDPA; a disagreement is logged."""
    return not _fails_elsewhere and _difference_here() is None


def decide_alike(everyones: list[bool]) -> None:
    """Give up attention by lengths on this rank if ``lengths_are_exact`` is false on any rank."""
    global _fails_elsewhere
    fails_somewhere = not all(everyones)
    if fails_somewhere and any(everyones):
        logger.warning(
            "samples are padded on all ranks: attention by lengths does not agree with SDPA on one of them."
        )
    _fails_elsewhere = fails_somewhere


@cache
def _difference_here() -> str | None:
    """Reason not to use ``varlen_attn`` on this machine, logged on GPUs; None if there is none."""
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
    """Name a difference of ``varlen_attn`` from SDPA in float32; None if there is none.

    The test rows are small and of unequal lengths, their heads share keys, and they run with and without a window.
    The check compares outputs and gradients, and outputs of single queries over parts of a buffer.
    """
    try:
        for window in (None, 16):
            error = _error_of_rows(device, dtype, window)
            if error > _LARGEST_ERROR:
                return f"rows with window {window}: wrong by {error:.2g} of the largest value"
            error = _error_of_decoding(device, dtype, window)
            if error > _LARGEST_ERROR:
                return f"decoding with window {window}: wrong by {error:.2g} of the largest value"
    except RuntimeError as failure:  # raised by torch's operators
        return str(failure).splitlines()[0]
    return None


def _error_of_rows(device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    """Largest error of outputs and gradients of packed rows, relative to the largest value."""
    n_tokens = [1, 70, 33]
    longest = max(n_tokens)
    query, key, value, weights = _random(device, dtype, sum(n_tokens), heads=(4, 2, 2, 4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    starts = _starts(n_tokens, device)
    output = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        window_size=(_n_earlier(window), 0),
        enable_gqa=True,
    )
    gradients = torch.autograd.grad(output, inputs, weights)

    exact_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    queries, keys, values = (tensor.split(n_tokens) for tensor in exact_inputs)
    documents = zip(queries, keys, values, strict=True)
    exact = torch.cat([_exact(*heads, window=window) for heads in documents])
    exact_gradients = torch.autograd.grad(exact, exact_inputs, weights.float())

    pairs = zip([output, *gradients], [exact, *exact_gradients], strict=True)
    return max(_relative_error(ours.detach(), expected.detach()) for ours, expected in pairs)


def _error_of_decoding(device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    """Largest error of single queries over the first keys of each row of a buffer."""
    n_keys = [5, 96, 40]
    columns = 128
    n_rows = len(n_keys)
    (query,) = _random(device, dtype, n_rows, heads=(4,))
    key, value = _random(device, dtype, n_rows * columns, heads=(2, 2))
    output = varlen_attn(
        query,
        key,
        value,
        _starts([1] * n_rows, device),
        _starts([columns] * n_rows, device),
        1,
        columns,
        window_size=(-1, -1) if window is None else (_n_earlier(window), 0),
        enable_gqa=True,
        seqused_k=torch.tensor(n_keys, dtype=torch.int32, device=device),
    )

    queries = query.float().split(1)
    keys = key.float().split(columns)
    values = value.float().split(columns)
    exact = [
        _exact(queries[row], keys[row][:n], values[row][:n], window=window)
        for row, n in enumerate(n_keys)
    ]
    return _relative_error(output, torch.cat(exact))


def _random(
    device: torch.device, dtype: torch.dtype, n_tokens: int, heads: tuple[int, ...]
) -> list[Tensor]:
    """Draw tensors (T, heads, 64), the same at each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n_tokens, n, 64, generator=generator).to(device, dtype) for n in heads]


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def _n_earlier(window: int | None) -> int:
    """Number of keys before a query's own, as the operator counts them: -1 for all."""
    return -1 if window is None else window - 1


def _exact(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attend causally from the last tokens of one document.

    ``query`` (Q, H, D), ``key`` and ``value`` (K, G, D) to (Q, H, D).
    """
    places = torch.arange(len(key), device=key.device)
    distance = places[-len(query) :, None] - places
    seen = (distance >= 0) & (distance < (window or len(key)))

    copies = query.shape[1] // key.shape[1]
    queries = query.transpose(0, 1)
    keys = key.repeat_interleave(copies, dim=1).transpose(0, 1)
    values = value.repeat_interleave(copies, dim=1).transpose(0, 1)
    output = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    return output.transpose(0, 1)


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    """Largest error over the largest value; infinite if it is NaN."""
    error = (ours.float() - exact).abs().max() / exact.abs().max()
    return float(error.nan_to_num(torch.inf))
