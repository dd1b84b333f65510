"""Micro-batches of one rank, for supervised training and the PTX loss; documents may share rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openppo.datasets import TokenExample, shard
from openppo.model_inputs import ModelInputs
from openppo.models.padding import packing_is_exact
from openppo.types import Comm

PACKED_ROW = 512
"""Tokens of a packed row: longer rows cost more attention, shorter ones waste more places."""

_IDLE = TokenExample(token_ids=[0, 0], loss_mask=[False, False])
"""Row of a rank that has no example while others have one."""


class TokenMicroBatch(NamedTuple):
    """Rows of one forward, with the tokens to learn."""

    inputs: ModelInputs
    loss_mask: Tensor  # (B, L) bool


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of an optimizer step.

    All ranks have equally many micro-batches; some may have no examples.
    """

    micro_batches: list[Any]
    n_targets: int
    """Target tokens, pairs or judged steps of all ranks: the loss is a mean over them."""
    n_input_tokens: int
    """Real tokens of this rank."""


def token_batch(
    examples: Sequence[TokenExample],
    micro_batch_size: int,
    pad_token_id: int,
    comm: Comm,
    pack_to: int | None = None,
) -> StepBatch:
    """Make this rank's share of a step; ``examples`` are the same on all ranks.

    A ``TokenMicroBatch`` has ``micro_batch_size`` rows: an example each, or as many as fit into ``pack_to`` tokens.
    Examples without a target are left out; the first token is never a target.
    """
    examples = [example for example in examples if any(example.loss_mask[1:])]
    n_targets = sum(sum(example.loss_mask[1:]) for example in examples)
    rows = [[example] for example in examples] if pack_to is None else pack(examples, pack_to)

    micro_batches = []
    n_input_tokens = 0
    for micro_rows in equal_micro_batches(rows, micro_batch_size, comm):
        micro_batch = _micro_batch(
            micro_rows or [[_IDLE]], pad_token_id, with_positions=pack_to is not None
        )
        micro_batches.append(micro_batch)
        n_input_tokens += sum(micro_batch.inputs.lengths)
    return StepBatch(micro_batches, n_targets, n_input_tokens)


def equal_micro_batches(examples: Sequence, micro_batch_size: int, comm: Comm) -> list[list]:
    """Cut this rank's share of ``examples``; micro-batches are empty if other ranks have more."""
    share = shard(examples, comm.rank, comm.world_size)
    largest_share = -(-len(examples) // comm.world_size)
    starts = range(0, max(largest_share, 1), micro_batch_size)
    return [share[start : start + micro_batch_size] for start in starts]


def pack(examples: Sequence[TokenExample], max_len: int) -> list[list[TokenExample]]:
    """Pack ``examples`` into rows of at most ``max_len`` tokens.

    The longest come first, each into the first row with room; a longer example has a row of its own.
    """
    rows: list[list[TokenExample]] = []
    lengths: list[int] = []
    for example in sorted(examples, key=lambda example: len(example.token_ids), reverse=True):
        n_tokens = len(example.token_ids)
        with_room = (place for place, length in enumerate(lengths) if length + n_tokens <= max_len)
        place = next(with_room, None)
        if place is None:
            rows.append([example])
            lengths.append(n_tokens)
        else:
            rows[place].append(example)
            lengths[place] += n_tokens
    return rows


def packed_row_length(
    model: Callable[..., Tensor],
    documents: Sequence[TokenExample],
    limit: int,
    device: torch.device,
) -> int | None:
    """Tokens of rows that ``documents`` share; None if ``model`` mixes them, or without any.

    At most ``PACKED_ROW`` and ``limit``, but at least the longest document.
    """
    if not documents or not packing_is_exact(model, device):
        return None
    longest = max(len(document.token_ids) for document in documents)
    return max(min(PACKED_ROW, limit), longest)


def _micro_batch(
    rows: Sequence[Sequence[TokenExample]], pad_token_id: int, with_positions: bool
) -> TokenMicroBatch:
    """Pad ``rows``, each of one document or, ``with_positions``, of several."""
    ids_of_rows = []
    targets_of_rows = []
    for documents in rows:
        ids: list[int] = []
        targets: list[int] = []
        for document in documents:
            ids += document.token_ids
            targets += [False, *document.loss_mask[1:]]
        ids_of_rows.append(ids)
        targets_of_rows.append(targets)

    inputs = ModelInputs.of_ids(ids_of_rows, pad_token_id)
    loss_mask = pad_sequence(
        [torch.tensor(targets) for targets in targets_of_rows], batch_first=True
    )
    if with_positions:
        position_ids = _position_ids(rows, inputs.sequences.shape[1])
        inputs = replace(inputs, position_ids=position_ids)
    else:
        inputs = inputs.with_media([documents[0].media for documents in rows])
    return TokenMicroBatch(inputs, loss_mask)


def _position_ids(rows: Sequence[Sequence[TokenExample]], width: int) -> Tensor:
    """Positions (B, ``width``) int64 of tokens in their documents.

    Padding continues the last document, for causal attention's fast path.
    """
    position_ids = torch.arange(width).repeat(len(rows), 1)
    for row, documents in zip(position_ids, rows, strict=True):
        start = 0
        for document in documents:
            row[start:] = torch.arange(width - start)
            start += len(document.token_ids)
    return position_ids
