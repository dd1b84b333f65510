"""Attention of a tree of tokens on CPUs.

Each token sees its own node up to itself, and all tokens of the nodes above. No unused score is computed. Parts of a
softmax are merged by their log-sums; the backward pass of each part needs only the sum over all (arXiv 2310.01889 does
the same with blocks of keys on several devices).
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _parts(nodes: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Yield queries and keys of each call, and the number of nodes that attend causally to themselves in it.

    First come nodes that attend to themselves, neighbours of equal length in one call; then, with the number 0, the
    nodes below each node, which attend to all of its tokens.
    """
    spans = nodes.tolist()
    for _, run in groupby(spans, lambda span: span[1] - span[0]):
        neighbours = list(run)
        tokens = slice(neighbours[0][0], neighbours[-1][1])
        yield tokens, tokens, len(neighbours)
    for first, end, stop in spans:
        if stop > end:
            yield slice(end, stop), slice(first, end), 0


def _view(tensor: Tensor, places: slice, n_nodes: int) -> Tensor:
    """View of some tokens of a tensor (1, H, T, ...).

    Its shape is (1, H, tokens, ...), or (nodes, H, tokens of one, ...).
    """
    part = tensor[:, :, places]
    if n_nodes == 0:
        return part
    return part[0].unflatten(1, (n_nodes, -1)).transpose(0, 1)


@torch.library.custom_op("openppo::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, nodes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend ``query`` (1, H, T, D); returns the same shape, and the log-sums of scores, float32 (1, H, T).

    ``key`` and ``value`` (1, G, T, D), H a multiple of G; all is computed in float32, since bfloat16 is slower.
    ``nodes`` are those of ``PrefixTree``; tokens outside of them see nothing and get 0.
    """
    dtype = query.dtype
    query = query.float()
    key = key.float()
    value = value.float()
    output = _by_token(query).zero_()
    log_sums = _by_token(query[..., 0]).fill_(-torch.inf)

    for queries, keys, n_nodes in _parts(nodes):
        is_causal = n_nodes > 0
        part_output, part_sums = _forward(
            _view(query, queries, n_nodes),
            _view(key, keys, n_nodes),
            _view(value, keys, n_nodes),
            dropout_p=0.0,
            is_causal=is_causal,
            scale=scale,
        )

        merged_output = _view(output, queries, n_nodes)
        merged_sums = _view(log_sums, queries, n_nodes)
        if is_causal:
            merged_output.copy_(part_output)
            merged_sums.copy_(part_sums)
            continue

        both_sums = torch.logaddexp(merged_sums, part_sums)
        merged_output.mul_(torch.exp(merged_sums - both_sums)[..., None])
        merged_output.add_(part_output * torch.exp(part_sums - both_sums)[..., None])
        merged_sums.copy_(both_sums)
    return output.to(dtype), log_sums


def _by_token(like: Tensor) -> Tensor:
    """Empty tensor (1, H, T, ...), laid out in memory token by token, like the parts."""
    return like.new_empty(like.transpose(1, 2).shape).transpose(1, 2)


@torch.library.custom_op("openppo::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    nodes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad = grad.float()
    query = query.float()
    key = key.float()
    value = value.float()
    output = output.float()
    query_grad = _by_token(query).zero_()
    key_grad = _by_token(key).zero_()
    value_grad = _by_token(value).zero_()

    for queries, keys, n_nodes in _parts(nodes):
        query_part, key_part, value_part = _gradients(
            _view(grad, queries, n_nodes),
            _view(query, queries, n_nodes),
            _view(key, keys, n_nodes),
            _view(value, keys, n_nodes),
            _view(output, queries, n_nodes),
            _view(log_sums, queries, n_nodes),
            dropout_p=0.0,
            is_causal=n_nodes > 0,
            scale=scale,
        )
        _view(query_grad, queries, n_nodes).add_(query_part)
        _view(key_grad, keys, n_nodes).add_(key_part)
        _view(value_grad, keys, n_nodes).add_(value_part)
    return query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype)


@tree_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, nodes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return _by_token(query), _by_token(query[..., 0].float())


@_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    nodes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(query), _by_token(key), _by_token(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, nodes, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, nodes)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query_grad, key_grad, value_grad = _backward(grad, *ctx.saved_tensors, ctx.scale)
    return query_grad, key_grad, value_grad, None, None


tree_attention.register_autograd(_differentiate, setup_context=_save)
