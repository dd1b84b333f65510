"""Attention of a tree of tokens on CPUs: each sees its own node up to itself, and the nodes above whole.

No score is computed that is not used. Parts of a softmax are put together by their log-sums; the backward pass of each
part needs only the sum over all (arXiv 2310.01889 does the same with blocks of keys on several devices).
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _parts(nodes: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Queries and keys of each call, and how many nodes see themselves in it, causally.

    First nodes that see themselves, neighbours of one length together; then, with 0, what continues a node sees it.
    """
    spans = nodes.tolist()
    for run in (list(run) for _, run in groupby(spans, lambda span: span[1] - span[0])):
        tokens = slice(run[0][0], run[-1][1])
        yield tokens, tokens, len(run)
    yield from (
        (slice(end, stop), slice(first, end), 0) for first, end, stop in spans if stop > end
    )


def _of(tensors: Iterable[Tensor], places: slice, n_nodes: int) -> list[Tensor]:
    """Views of some tokens of tensors (1, H, T, ...): (1, H, tokens, ...), or (nodes, H, tokens of one, ...)."""
    parts = [x[:, :, places] for x in tensors]
    return (
        [x[0].unflatten(1, (n_nodes, -1)).transpose(0, 1) for x in parts] if n_nodes > 0 else parts
    )


@torch.library.custom_op("openppo::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, nodes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``query`` (1, H, T, D) to the same, and the log-sums of scores, float32 (1, H, T).

    ``key`` and ``value`` (1, G, T, D), H a multiple of G; all is computed in float32, since bfloat16 is slower.
    ``nodes`` are those of ``PrefixTree``; tokens outside of them see nothing and get 0.
    """
    dtype = query.dtype
    query = query.float()
    key = key.float()
    value = value.float()
    output, total = _by_token(query).zero_(), _by_token(query[..., 0]).fill_(-torch.inf)
    for queries, keys, n in _parts(nodes):
        given = [*_of([query], queries, n), *_of([key, value], keys, n)]
        part, of_part = _forward(*given, 0.0, n > 0, scale=scale)
        mixed, sums = _of([output, total], queries, n)
        if n > 0:
            mixed.copy_(part)
            sums.copy_(of_part)
            continue
        both = torch.logaddexp(sums, of_part)
        mixed.mul_(torch.exp(sums - both)[..., None]).add_(
            part * torch.exp(of_part - both)[..., None]
        )
        sums.copy_(both)
    return output.to(dtype), total


def _by_token(like: Tensor) -> Tensor:
    """Empty (1, H, T, ...), in memory token by token, as the parts are."""
    return like.new_empty(like.transpose(1, 2).shape).transpose(1, 2)


@torch.library.custom_op("openppo::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    nodes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value, output = (x.float() for x in (grad, query, key, value, output))
    sums = [_by_token(x).zero_() for x in (query, key, value)]
    for queries, keys, n in _parts(nodes):
        of_queries, of_keys = (
            _of([grad, query, output, total], queries, n),
            _of([key, value], keys, n),
        )
        found = _gradients(*of_queries[:2], *of_keys, *of_queries[2:], 0.0, n > 0, scale=scale)
        for into, part in zip(
            _of(sums[:1], queries, n) + _of(sums[1:], keys, n), found, strict=True
        ):
            into.add_(part)
    return sums[0].to(dtype), sums[1].to(dtype), sums[2].to(dtype)


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
    total: Tensor,
    nodes: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(query), _by_token(key), _by_token(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, nodes, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, nodes)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


tree_attention.register_autograd(_differentiate, setup_context=_keep)
