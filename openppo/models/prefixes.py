"""Rows with shared prefixes, as one row of the model in which each prefix is computed once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from openppo import logger
from openppo.media import Media, MediaItem, TokenIds, item_places
from openppo.model_inputs import ModelInputs, pad_to
from openppo.models.attention import BY_LENGTHS, ON_CPU, PREFIX_TREE, finished_mask
from openppo.models.media_inputs import media_inputs, rope_positions
from openppo.models.padding import (
    NOISE,
    arguments_on_device,
    base_of,
    device_of,
    is_exact,
    pack_rows,
    rounded_width,
)
from openppo.models.prefix_batches import LEAST_SHARED, pays, shared_order
from openppo.models.pretrained import layer_kinds
from openppo.models.vision_models import placeholders

_Span = tuple[int, int, int]
"""First token and two bounds of a node."""
_NOISE_IN_FLOAT32 = 1e-3
"""``NOISE`` of a model in float32."""


class PrefixTree(NamedTuple):
    """Tree of the prefixes of a batch (B, L): its T tokens, each prefix once, depth first.

    ``tokens`` int64 (T,): the place of each in the flat batch; ``depths`` int64 (T,): the number of tokens before it in
    its row; ``in_row`` int64 (B x L,): the place among the T of each token of the flat batch (arbitrary for padding).
    ``nodes`` int64 (N, 3): first token, end, and end of the nodes below, whose tokens see all tokens of the node.
    """

    tokens: Tensor
    depths: Tensor
    in_row: Tensor
    nodes: Tensor


def prefix_tree(rows: Sequence[list[int]], width: int) -> PrefixTree:
    """Make the tree of rows that are padded on the right to ``width`` in the batch."""
    order, shared = shared_order(rows)
    lengths = [len(rows[i]) for i in order]
    row_numbers = torch.tensor(order)

    # All (B, L), rows in the order of the tree.
    depth = torch.arange(width).expand(len(rows), width)
    is_prefix = depth < torch.tensor(shared)[:, None]
    is_real = depth < torch.tensor(lengths)[:, None]
    is_new = is_real & ~is_prefix
    new_numbers = is_new.flatten().cumsum(0).view_as(is_new) - 1
    numbers = torch.where(is_new, new_numbers, -1)
    # A token of a shared prefix is the last new token in its column, in a row above.
    places = numbers.cummax(0).values.clamp(min=0)

    in_row = torch.empty_like(places)
    in_row[row_numbers] = places
    flat_places = row_numbers[:, None] * width + depth
    tokens = flat_places[is_new]
    nodes = torch.tensor(_nodes(lengths, shared)).view(-1, 3)
    return PrefixTree(tokens, depth[is_new], in_row.flatten(), nodes=nodes)


def _nodes(lengths: Sequence[int], shared: Sequence[int]) -> list[_Span]:
    """``nodes`` of a tree, from its rows' lengths and those of prefixes shared with the previous row."""
    nodes: list[_Span] = []
    path: list[_Span] = []  # open nodes: first token, its depth, depth of the end
    n_tokens = 0

    def close(depth: int) -> None:
        """End the nodes, and parts of nodes, below ``depth``."""
        while path and path[-1][2] > depth:
            first, low, high = path.pop()
            cut = max(low, depth)
            nodes.append((first + cut - low, first + high - low, n_tokens))
            if low < depth:
                path.append((first, low, depth))

    for length, n_shared in zip(lengths, shared, strict=True):
        close(n_shared)
        if length > n_shared:
            path.append((n_tokens, n_shared, length))
        n_tokens += length - n_shared
    close(0)
    return sorted(nodes)


def row_inputs(module: Any, inputs: ModelInputs) -> tuple[dict[str, Any], Tensor] | None:
    """Join a batch into one row of ``module.model``: arguments of its forward, and the place of each token.

    With ``shares_prompts``, shared prefixes occur once in the row where that pays. In all other cases the result is
    that of ``pack_rows`` if ``module.packs_rows`` is set, else None.
    """
    if module.shares_prompts and inputs.position_ids is None and len(inputs) > 1:
        rows = inputs.distinct_rows
        sequences = inputs.sequences
        tree = prefix_tree(rows, sequences.shape[1])
        n_otherwise = sum(map(len, rows)) if module.packs_rows else sequences.numel()
        if pays(len(tree.depths), n_otherwise):
            arguments = _tree_arguments(tree, inputs, module.model)
            return arguments, tree.in_row.to(sequences.device)

    if not module.packs_rows:
        return None
    return pack_rows(inputs, module.model)


def _tree_arguments(tree: PrefixTree, inputs: ModelInputs, model: Any) -> dict[str, Any]:
    """Arguments (1, T) of the forward for a tree; in bfloat16 on CPUs T is rounded up, as in ``pad_width``."""
    sequences = inputs.sequences
    device = device_of(model)
    width = len(tree.depths)
    if device.type == "cpu" and model.dtype is torch.bfloat16:
        width = rounded_width(width)
    tree_ids = sequences.flatten()[tree.tokens.to(sequences.device)]
    ids = pad_to(tree_ids, width)[None]
    depths = pad_to(tree.depths, width)[None]
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": depths,
        "attention_mask": finished_mask(device),
    }

    if any(inputs.media):
        mask = torch.ones_like(ids, dtype=torch.bool)
        row = ModelInputs(ids, mask, (_tree_media(tree, inputs),))
        arguments |= media_inputs(base_of(model), row)
        positions = rope_positions(model, inputs)  # (3, B, L)
        if positions is not None:
            tree_positions = positions.flatten(1)[:, tree.tokens.to(positions.device)]  # (3, T)
            arguments["position_ids"] = pad_to(tree_positions, width)[:, None]

    if model.config._attn_implementation == BY_LENGTHS:
        return arguments_on_device(arguments | _lengths_arguments(tree.nodes), device)
    return arguments_on_device(arguments, device) | {PREFIX_TREE: tree.nodes}


def _tree_media(tree: PrefixTree, inputs: ModelInputs) -> Media:
    """Images of the tree, in the order of their tokens."""
    items_by_place: dict[int, MediaItem] = {}
    row_start = 0
    for ids, row_media in zip(inputs.sequences.tolist(), inputs.media, strict=True):
        for item, places in item_places(TokenIds(ids, row_media)):
            items_by_place[row_start + places[0]] = item
        row_start += len(ids)
    tree_places = tree.tokens.tolist()
    return tuple(items_by_place[place] for place in tree_places if place in items_by_place)


def _lengths_arguments(nodes: Tensor) -> dict[str, Any]:
    """Arguments for attention by lengths: queries are the tokens of each node, keys those that they see."""
    spans = nodes.tolist()
    keys = []
    for first, end, _ in spans:
        node_keys = []
        for start, stop, last in spans:
            if stop <= first < last:  # the node is above
                node_keys.append(torch.arange(start, stop))
        node_keys.append(torch.arange(first, end))
        keys.append(torch.cat(node_keys))

    n_queries = nodes[:, 1] - nodes[:, 0]
    n_keys = torch.tensor([*map(len, keys)])
    return {
        "cu_seq_lens_q": _starts(n_queries),
        "cu_seq_lens_k": _starts(n_keys),
        PREFIX_TREE: torch.cat(keys),
        "max_length_q": int(n_queries.max()),
        "max_length_k": int(n_keys.max()),
    }


def _starts(lengths: Tensor) -> Tensor:
    """Starts of consecutive runs, and the end of the last, int32."""
    return F.pad(lengths.cumsum(0), (1, 0)).int()


def text_ids(config: PreTrainedConfig, n: int) -> list[int]:
    """Draw ``n`` token ids of text from the whole vocabulary, alike on all ranks.

    On a row of the first ids, which are often special tokens, a trained model amplifies the rounding of bfloat16: that
    of SmolLM2 moved its log-probs by 3.6 nats, where ids of text move them by 0.2.
    """
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.get_text_config().vocab_size, (2 * n,), generator=draw)
    media = placeholders(config)
    return [token_id for token_id in drawn.tolist() if token_id not in media][:n]


@torch.no_grad()
def share_where_exact(
    module: Any, forward: Callable[[ModelInputs], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` compute shared prefixes of a batch once if tiny forwards show equal outputs.

    ``forward`` is the module or the engine around it, called by all ranks together.
    """
    otherwise = f"prompts of the {name} are computed for each response"
    config = module.model.config
    attention = config._attn_implementation
    # Windows may be longer than the tiny forwards, which would then not reveal their errors.
    other_kinds = layer_kinds(config) - {"full_attention", "global"}
    if other_kinds or attention not in (ON_CPU, BY_LENGTHS):
        kinds = ", ".join(sorted(other_kinds))
        logger.info("%s: its attention is %s", otherwise, kinds or attention)
        return

    prompt = text_ids(config, 3 * LEAST_SHARED)

    def beside(response: list[int]) -> Tensor:
        module.use_sharing(len(response) > 0)
        row = [*prompt, 2, 0, 1]
        other_row = [*prompt, *(response or [3, 3, 0])]
        inputs = ModelInputs.of_ids([row, other_row], pad_token_id=0)
        return forward(inputs.to(device))[0]

    noise = NOISE if module.model.dtype.itemsize < 4 else _NOISE_IN_FLOAT32
    module.use_sharing(is_exact(otherwise, beside, noise))
