"""Examples to one rank's micro-batches, for supervised training and the PTX loss; documents may share rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openppo.datasets import TokenExample, shard
from openppo.media import Media
from openppo.models.padding import packing_is_exact, pad_right
from openppo.types import Comm

PACKED_ROW = 512  # tokens: attention costs more in longer rows, and shorter ones waste more places
_IDLE = TokenExample(token_ids=[0, 0], loss_mask=[False, False])


class TokenMicroBatch(NamedTuple):
    """Rows of one forward, all (B, L): ``sequences`` int64, masks bool.

    ``position_ids`` int64 restart at 0 at each document of a packed row (None: a row is one document). ``media`` are
    the images of each row, if any has some.
    """

    sequences: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of an optimizer step: equally many micro-batches on all ranks, some perhaps without examples."""

    micro_batches: list[Any]
    n_targets: int
    """Target tokens, pairs or judged steps of all ranks, over which the loss is a mean."""
    n_input_tokens: int
    """Real tokens of this rank."""


def token_batch(
    examples: Sequence[TokenExample],
    micro_batch_size: int,
    pad_token_id: int,
    comm: Comm,
    pack_to: int | None = None,
) -> StepBatch:
    """This rank's share of a step's ``examples``, given alike on all ranks; those without a target are left out.

    A ``TokenMicroBatch`` has ``micro_batch_size`` rows: an example each, or as many as fit into ``pack_to`` tokens. The
    first token of an example is never a target.
    """
    examples = [example for example in examples if any(example.loss_mask[1:])]
    rows = [[example] for example in examples] if pack_to is None else pack(examples, pack_to)
    micro_batches = [
        _micro_batch(micro or [[_IDLE]], pad_token_id, with_positions=pack_to is not None)
        for micro in equal_micro_batches(rows, micro_batch_size, comm)
    ]
    n_input_tokens = sum(int(micro.attention_mask.sum()) for micro in micro_batches)
    return StepBatch(
        micro_batches, sum(sum(example.loss_mask[1:]) for example in examples), n_input_tokens
    )


def equal_micro_batches(examples: Sequence, micro_batch_size: int, comm: Comm) -> list[list]:
    """This rank's share of ``examples`` in micro-batches, with empty ones where other ranks have more."""
    mine = shard(examples, comm.rank, comm.world_size)
    largest = -(-len(examples) // comm.world_size)
    return [
        mine[start : start + micro_batch_size]
        for start in range(0, max(largest, 1), micro_batch_size)
    ]


def pack(examples: Sequence[TokenExample], max_len: int) -> list[list[TokenExample]]:
    """``examples`` in rows of at most ``max_len`` tokens, the longest first, each in the first row with room.

    A longer example has a row of its own.
    """
    rows: list[list[TokenExample]] = []
    for example in sorted(examples, key=lambda example: len(example.token_ids), reverse=True):
        with_room = (
            row for row in rows if sum(len(e.token_ids) for e in [*row, example]) <= max_len
        )
        if (row := next(with_room, None)) is None:
            rows.append(row := [])
        row.append(example)
    return rows


def packed_row_length(
    model: Callable[..., Tensor],
    documents: Sequence[TokenExample],
    limit: int,
    device: torch.device,
) -> int | None:
    """Length of rows of ``documents``: 512, ``limit`` or the longest; None without any, or if ``model`` mixes them."""
    if not documents or not packing_is_exact(model, device):
        return None
    return max(min(PACKED_ROW, limit), max(len(document.token_ids) for document in documents))


def _micro_batch(
    rows: Sequence[Sequence[TokenExample]], pad_token_id: int, with_positions: bool
) -> TokenMicroBatch:
    sequences, attention_mask = pad_right(
        [[i for e in row for i in e.token_ids] for row in rows], pad_token_id
    )
    targets = [[is_target for e in row for is_target in (False, *e.loss_mask[1:])] for row in rows]
    loss_mask = pad_right(targets, 0)[0].bool()
    if not with_positions:
        media = tuple(row[0].media for row in rows)
        return TokenMicroBatch(
            sequences,
            attention_mask,
            loss_mask,
            position_ids=None,
            media=media if any(media) else (),
        )
    position_ids = torch.arange(sequences.shape[1]).repeat(len(rows), 1)
    for row, documents in zip(position_ids, rows, strict=True):
        start = 0
        for (
            document
        ) in documents:  # padding continues the last document, for causal attention's fast path
            row[start:] = torch.arange(len(row) - start)
            start += len(document.token_ids)
    return TokenMicroBatch(sequences, attention_mask, loss_mask, position_ids=position_ids)
