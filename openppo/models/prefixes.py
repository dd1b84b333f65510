"""Rows that begin alike, as one row of the model in which each beginning is computed once."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo import logger
from openppo.media import Media, MediaItem, distinct_ids, item_places
from openppo.models.attention import BY_LENGTHS, ON_CPU, PREFIX_TREE, finished_mask
from openppo.models.batching import LEAST_SHARED, pays, shared_order
from openppo.models.media_inputs import model_inputs, rope_positions
from openppo.models.padding import (
    NOISE,
    base_of,
    device_of,
    is_exact,
    on_device,
    pack_rows,
    rounded_width,
)
from openppo.models.pretrained import layer_kinds

_NOISE_IN_FLOAT32 = 1e-3


class PrefixTree(NamedTuple):
    """Tokens of a batch (B, L) without what rows repeat: T of them, depth first, the tree of their beginnings.

    ``tokens`` int64 (T,): the place of each in the flat batch; ``depths`` int64 (T,): how many come before it in its
    row; ``in_row`` int64 (B x L,): where among T each token of the flat batch is (padding: anywhere). ``nodes`` int64
    (N, 3): first token, end, and end of what continues it: those see the node's tokens whole.
    """

    tokens: Tensor
    depths: Tensor
    in_row: Tensor
    nodes: Tensor


def prefix_tree(rows: Sequence[list[int]], width: int) -> PrefixTree:
    """The tree of rows that are padded on the right to ``width`` in the batch."""
    order, shared = shared_order(rows)
    lengths = [len(rows[i]) for i in order]
    depth = torch.arange(width).expand(
        len(rows), width
    )  # (B, L), like all below in the order of the tree
    is_new = (depth >= torch.tensor(shared)[:, None]) & (depth < torch.tensor(lengths)[:, None])
    numbers = torch.where(is_new.flatten(), is_new.flatten().cumsum(0) - 1, -1).view_as(is_new)
    places = numbers.cummax(0).values.clamp(
        min=0
    )  # a token that is not new is the last new one above it
    in_row = torch.empty_like(places)
    in_row[torch.tensor(order)] = places
    flat = (torch.tensor(order)[:, None] * width + depth)[is_new]
    nodes = torch.tensor(_nodes(lengths, shared)).view(-1, 3)
    return PrefixTree(flat, depth[is_new], in_row.flatten(), nodes=nodes)


def _nodes(lengths: Sequence[int], shared: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of rows in the order of the tree, of which each begins with so many tokens of the one before."""
    nodes: list[tuple[int, int, int]] = []
    path: list[tuple[int, int, int]] = []  # open nodes: first token, its depth, depth of the end
    at = 0

    def close(least: int) -> None:
        """End what lies deeper than ``least`` tokens."""
        while path and path[-1][2] > least:
            first, low, high = path.pop()
            cut = max(low, least)
            nodes.append((first + cut - low, first + high - low, at))
            if low < least:
                path.append((first, low, least))

    for length, depth in zip(lengths, shared, strict=True):
        close(depth)
        if length > depth:
            path.append((at, depth, length))
        at += length - depth
    close(0)
    return sorted(nodes)


def row_inputs(
    module: Any,
    sequences: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor | None = None,
    media: Sequence[Media] = (),
) -> tuple[dict[str, Any], Tensor] | None:
    """A batch as one row of ``module.model``, and where each token is in it, as ``pack_rows`` gives them.

    With ``shares_prompts`` what rows begin with is in it once, where that pays; else there is one with ``packs_rows``.
    """
    if module.shares_prompts and position_ids is None and len(sequences) > 1:
        lengths = attention_mask.bool().sum(1).tolist()
        rows = [row[:n] for row, n in zip(sequences.tolist(), lengths, strict=True)]
        rows = [distinct_ids(row, of_row) for row, of_row in zip_longest(rows, media, fillvalue=())]
        tree = prefix_tree(rows, sequences.shape[1])
        if pays(len(tree.depths), sum(lengths) if module.packs_rows else sequences.numel()):
            return _inputs(tree, sequences, module.model, media=media), tree.in_row.to(
                sequences.device
            )
    return (
        pack_rows(sequences, attention_mask, module.model, position_ids=position_ids)
        if module.packs_rows
        else None
    )


def _inputs(
    tree: PrefixTree, sequences: Tensor, model: Any, media: Sequence[Media]
) -> dict[str, Any]:
    """Inputs (1, T); in bfloat16 on CPUs T is a little larger, for the reason of ``pad_width``."""
    device, width = device_of(model), len(tree.depths)
    if device.type == "cpu" and model.dtype is torch.bfloat16:
        width = rounded_width(width)
    flat = sequences.flatten()[tree.tokens.to(sequences.device)], tree.depths
    ids, positions = (F.pad(x, (0, width - len(x)))[None] for x in flat)
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": finished_mask(device)}
    if any(media):
        firsts = {
            i * sequences.shape[1] + t: item for i, t, item in _first_places(sequences, media)
        }
        items = tuple(firsts[place] for place in tree.tokens.tolist() if place in firsts)
        given |= model_inputs(base_of(model), ids, [items])
        if (places := rope_positions(model, sequences, media)) is not None:  # (3, B, L)
            new = places.flatten(1)[:, tree.tokens.to(places.device)]
            given["position_ids"] = F.pad(new, (0, width - new.shape[1]))[:, None]
    if model.config._attn_implementation != BY_LENGTHS:
        return {name: on_device(value, device) for name, value in given.items()} | {
            PREFIX_TREE: tree.nodes
        }
    spans, paths = tree.nodes.tolist(), list[Tensor]()  # of each node: the tokens that its own see
    for first, end, _ in spans:
        above = [torch.arange(a, b) for a, b, stop in spans if b <= first < stop]
        paths.append(torch.cat([*above, torch.arange(first, end)]))
    n_keys, n_queries = (
        torch.tensor([len(path) for path in paths]),
        tree.nodes[:, 1] - tree.nodes[:, 0],
    )
    given |= {
        "cu_seq_lens_q": _starts(n_queries),
        "cu_seq_lens_k": _starts(n_keys),
        PREFIX_TREE: torch.cat(paths),
    }
    lengths = {"max_length_q": int(n_queries.max()), "max_length_k": int(n_keys.max())}
    return {name: on_device(value, device) for name, value in given.items()} | lengths


def _first_places(
    sequences: Tensor, media: Sequence[Media]
) -> Iterator[tuple[int, int, MediaItem]]:
    """Row and place of the first token of each item."""
    for i, (row, of_row) in enumerate(zip(sequences.tolist(), media, strict=True)):
        yield from ((i, places[0], item) for item, places in item_places(row, of_row))


def _starts(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()


@torch.no_grad()
def share_where_exact(
    module: Any, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` compute what rows of a batch begin with once, if that gives the same, by tiny forwards.

    ``forward`` is the module or the engine around it, called by all ranks together.
    """
    otherwise = f"prompts of the {name} are computed for each response"
    config = module.model.config
    kinds, attention = (
        layer_kinds(config) - {"full_attention", "global"},
        config._attn_implementation,
    )
    if kinds or attention not in (
        ON_CPU,
        BY_LENGTHS,
    ):  # windows longer than what is tried would not be seen
        logger.info("%s: its attention is %s", otherwise, ", ".join(sorted(kinds)) or attention)
        return
    common = [1 + i % 3 for i in range(3 * LEAST_SHARED)]

    def beside(last: list[int]) -> Tensor:
        module.shares_prompts = len(last) > 0
        sequences = torch.tensor([[*common, 2, 0, 1], [*common, *(last or [3, 3, 0])]])
        return forward(
            sequences.to(device), torch.ones_like(sequences, dtype=torch.bool).to(device)
        )[0]

    is_half = module.model.dtype.itemsize < 4
    module.shares_prompts = is_exact(otherwise, beside, NOISE if is_half else _NOISE_IN_FLOAT32)
