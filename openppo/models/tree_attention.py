"""Attention of a tree of tokens on CPUs: each sees its own node up to itself, and the nodes above whole.

No score is computed that is not used. Parts of a softmax are put together by their log-sums; the backward pass of each
part needs only the sum over all (arXiv 2310.01889 does the same with blocks of keys on several devices).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _parts(nodes: Tensor) -> Iterator[tuple[slice, slice, bool]]:
    """Queries and keys, and whether they are the same tokens, of which each sees those before it; own nodes first."""
    spans = nodes.tolist()
    yield from ((slice(first, end), slice(first, end), True) for first, end, _ in spans)
    yield from ((slice(end, stop), slice(first, end), False) for first, end, stop in spans if stop > end)


@torch.library.custom_op("openppo::tree_attention", mutates_args=())
def tree_attention(query: Tensor, key: Tensor, value: Tensor, nodes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``query`` (1, H, T, D) to the same, and the log-sums of scores, float32 (1, H, T).

    ``key`` and ``value`` (1, G, T, D), H a multiple of G; all is computed in float32, since bfloat16 is slower.
    ``nodes`` are those of ``PrefixTree``; tokens outside of them see nothing and get 0.
    """
    dtype = query.dtype
    query, key, value = query.float(), key.float(), value.float()
    output, total = _by_token(query).zero_(), _by_token(query[..., 0]).fill_(-torch.inf)
    for queries, keys, is_own in _parts(nodes):
        given = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        part, of_part = _forward(*given, 0.0, is_own, scale=scale)
        if is_own:
            output[:, :, queries], total[:, :, queries] = part, of_part
            continue
        both = torch.logaddexp(total[:, :, queries], of_part)
        kept, added = (torch.exp(x - both)[..., None] for x in (total[:, :, queries], of_part))
        output[:, :, queries].mul_(kept).add_(part * added)
        total[:, :, queries] = both
    return output.to(dtype), total


def _by_token(like: Tensor) -> Tensor:
    """Empty (1, H, T, ...), in memory token by token, as the parts are."""
    return like.new_empty(like.transpose(1, 2).shape).transpose(1, 2)


@torch.library.custom_op("openppo::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, nodes: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value, output = (x.float() for x in (grad, query, key, value, output))
    sums = [_by_token(x).zero_() for x in (query, key, value)]
    for queries, keys, is_own in _parts(nodes):
        given = grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys]
        found = _gradients(*given, output[:, :, queries], total[:, :, queries], 0.0, is_own, scale=scale)
        for into, part, places in zip(sums, found, (queries, keys, keys), strict=True):
            if is_own:
                into[:, :, places] = part
            else:
                into[:, :, places] += part
    return sums[0].to(dtype), sums[1].to(dtype), sums[2].to(dtype)


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, nodes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _by_token(query), _by_token(query[..., 0].float())


@_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor, nodes: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_token(query), _by_token(key), _by_token(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, nodes, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, nodes)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


tree_attention.register_autograd(_differentiate, setup_context=_keep)
