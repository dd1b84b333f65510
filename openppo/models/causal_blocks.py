"""Causal attention in blocks of queries: an operator for bfloat16 on CPUs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK = 64
"""Queries of a block; scores of the keys after its last query are not computed."""
_SCORES = 1 << 20
"""Approximate number of scores at a time: 4 MiB in float32."""


@torch.library.custom_op("openppo::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, n_kept: int
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v of each token over itself and the tokens before it, with the softmax in float32.

    ``query`` (B, H, L, D); ``key`` and ``value`` (B, G, L, D) with H a multiple of G. Returns (B, L, H, D) in their
    dtype and, for the backward pass, ``n_kept`` weights block by block (see ``n_weights``). ``n_kept`` is an argument
    because compiled graphs are cached on disk, where later releases find them too.
    """
    n_rows, heads, length, width = query.shape
    groups = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(n_rows, length, heads, width)
    kept = query.new_empty(n_kept)

    for rows, start, end, place in _blocks(query):
        size = end - start
        queries = _by_group(query[rows, :, start:end], groups).to(dtype) * scale
        keys = key[rows, :, :end].flatten(0, 1).to(dtype)
        values = value[rows, :, :end].flatten(0, 1)

        scores = torch.bmm(queries, keys.transpose(1, 2))
        later_keys = torch.full((size, size), -torch.inf, dtype=dtype).triu_(1)
        scores.view(-1, size, end)[..., start:].add_(later_keys)

        if n_kept > 0:
            weights = kept[place].view(scores.shape)
            weights.copy_(torch.softmax(scores, -1))
        else:
            weights = torch.softmax(scores, -1).to(query.dtype)
        mixed = torch.bmm(weights, values).view(-1, heads, size, width)
        output[rows, start:end] = mixed.transpose(1, 2)
    return output, kept


@torch.library.custom_op("openppo::causal_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    groups = key.shape[1]
    width = query.shape[-1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_grad = torch.zeros_like(query, memory_format=torch.contiguous_format)
    key_grad = torch.zeros_like(key, memory_format=torch.contiguous_format)
    value_grad = torch.zeros_like(value, memory_format=torch.contiguous_format)

    # Mean gradient of a query's weights, (B, H, L, 1).
    grad = grad.transpose(1, 2)  # (B, H, L, D)
    products = grad.to(dtype) * output.transpose(1, 2)
    mean = products.sum(-1, keepdim=True).to(query.dtype)

    for rows, start, end, place in _blocks(query):
        size = end - start
        queries = _by_group(query[rows, :, start:end], groups)
        output_grads = _by_group(grad[rows, :, start:end], groups)
        means = _by_group(mean[rows, :, start:end], groups)
        keys = key[rows, :, :end].flatten(0, 1)
        values = value[rows, :, :end].flatten(0, 1)
        weights = kept[place].view(len(output_grads), -1, end)

        score_grads = torch.bmm(output_grads, values.transpose(1, 2))
        score_grads.sub_(means).mul_(weights)

        query_part = torch.bmm(score_grads, keys)
        key_part = torch.bmm(score_grads.transpose(1, 2), queries)
        value_part = torch.bmm(weights.transpose(1, 2), output_grads)
        query_grad[rows, :, start:end] = query_part.view(-1, heads, size, width)
        key_grad[rows, :, :end] += key_part.view(-1, groups, end, width)
        value_grad[rows, :, :end] += value_part.view(-1, groups, end, width)
    return query_grad.mul_(scale), key_grad.mul_(scale), value_grad


def n_weights(query: Tensor) -> int:
    """Return the number of weights of all blocks, at most."""
    n_blocks, size = _block_counts(query.shape[2])
    scores_per_head = size * size * n_blocks * (n_blocks + 1) // 2
    return query.shape[0] * query.shape[1] * scores_per_head


def _block_counts(length: int) -> tuple[int, int]:
    """Number of blocks of queries, and the size of all but the last."""
    n_blocks = (length + _BLOCK - 1) // _BLOCK
    return n_blocks, (length + n_blocks - 1) // n_blocks


def _blocks(query: Tensor) -> Iterator[tuple[slice, int, int, slice]]:
    """Yield rows of the batch, start and end of queries, and the place of their weights."""
    n_rows, heads, length, _ = query.shape
    _, size = _block_counts(length)
    rows_at_once = max(1, _SCORES // (heads * size * length))
    first_weight = 0
    for row in range(0, n_rows, rows_at_once):
        rows = slice(row, min(row + rows_at_once, n_rows))
        for start in range(0, length, size):
            end = min(start + size, length)
            end_of_weights = first_weight + (rows.stop - row) * heads * (end - start) * end
            yield rows, start, end, slice(first_weight, end_of_weights)
            first_weight = end_of_weights


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    """Fold heads that share keys: (B, H, L, D) to (B * G, H / G * L, D)."""
    return tensor.reshape(len(tensor) * groups, -1, tensor.shape[-1])


@causal_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, scale: float, n_kept: int
) -> tuple[Tensor, Tensor]:
    n_rows, heads, length, width = query.shape
    return query.new_empty(n_rows, length, heads, width), query.new_empty(n_kept)


@_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    kept: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.scale, _ = inputs
    ctx.save_for_backward(query, key, value, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


causal_attention.register_autograd(_differentiate, setup_context=_keep)
