"""Token examples to one rank's micro-batches of an optimizer step, for SFT and the PTX loss.

Several short documents may share a row: less padding, fewer forwards, the same log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openppo.datasets import TokenExample, shard
from openppo.models.padding import pad_right
from openppo.types import Comm

logger = logging.getLogger("openppo")

_ROW_LENGTH = 512
"""Attention costs more in longer rows, and shorter ones waste more places."""
_LEAK = 1e-5
_NOISE = 0.05
"""Log-probs of one document at two places of a row differ by less than this, in bfloat16 too."""
_IDLE = TokenExample(token_ids=[0, 0], loss_mask=[False, False])


class TokenMicroBatch(NamedTuple):
    """Rows of one forward, all (B, L): ``sequences`` int64, the masks bool.

    ``position_ids`` int64 start again at 0 at each document of a packed row (None: a row is one document).
    """

    sequences: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None

    def to(self, device: torch.device) -> TokenMicroBatch:
        """A copy on ``device``."""
        sequences, attention_mask, loss_mask = (tensor.to(device) for tensor in self[:3])
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return TokenMicroBatch(sequences, attention_mask, loss_mask, positions)


@dataclass(frozen=True)
class TokenBatch:
    """Micro-batches, equally many on all ranks.

    ``n_tokens`` counts the target tokens of the whole step. The first token of an example is never a target.
    """

    micro_batches: list[TokenMicroBatch]
    n_tokens: int

    @property
    def n_input_tokens(self) -> int:
        """Real tokens that this rank feeds to the model."""
        return sum(int(micro.attention_mask.sum()) for micro in self.micro_batches)

    def to(self, device: torch.device) -> Iterator[TokenMicroBatch]:
        """The micro-batches, one after the other on ``device``."""
        for micro in self.micro_batches:
            yield micro.to(device)


def token_batch(
    examples: Sequence[TokenExample],
    micro_batch_size: int,
    pad_token_id: int,
    comm: Comm,
    pack_to: int | None = None,
) -> TokenBatch:
    """This rank's share of ``examples``, which are those of the whole step and the same on all ranks.

    A micro-batch has ``micro_batch_size`` rows. A row is one example, or with ``pack_to`` as many as fit into that
    number of tokens. Examples without any target are left out.
    """
    examples = [example for example in examples if any(example.loss_mask[1:])]
    rows = [[example] for example in examples] if pack_to is None else pack(examples, pack_to)
    micro_batches = [
        _micro_batch(micro or [[_IDLE]], pad_token_id, with_positions=pack_to is not None)
        for micro in equal_micro_batches(rows, micro_batch_size, comm)
    ]
    return TokenBatch(micro_batches, n_tokens=sum(sum(example.loss_mask[1:]) for example in examples))


def equal_micro_batches(examples: Sequence, micro_batch_size: int, comm: Comm) -> list[list]:
    """This rank's share of ``examples`` in micro-batches; empty ones at the end where other ranks have more."""
    mine = shard(examples, comm.rank, comm.world_size)
    largest = -(-len(examples) // comm.world_size)
    starts = range(0, max(largest, 1), micro_batch_size)
    return [list(mine[start : start + micro_batch_size]) for start in starts]


def pack(examples: Sequence[TokenExample], max_len: int) -> list[list[TokenExample]]:
    """``examples`` in rows of at most ``max_len`` tokens, by first fit of the longest first; the same on all ranks.

    An example that is longer has a row of its own.
    """
    rows: list[list[TokenExample]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: len(example.token_ids), reverse=True):
        length = len(example.token_ids)
        row = next((i for i, left in enumerate(room) if length <= left), None)
        if row is None:
            rows.append([example])
            room.append(max_len - length)
        else:
            rows[row].append(example)
            room[row] -= length
    return rows


def packed_row_length(
    model: Callable[..., Tensor], documents: Sequence[TokenExample], limit: int, device: torch.device
) -> int | None:
    """Length of the rows that ``documents`` share: their longest, or 512 where ``limit`` allows it.

    None if there are no documents or ``model`` does not keep them apart, see ``packing_is_exact``.
    """
    if not documents or not packing_is_exact(model, device):
        return None
    return max(min(_ROW_LENGTH, limit), max(len(document.token_ids) for document in documents))


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether ``model`` keeps documents of one row apart, found out by one tiny forward; the log says if not.

    ``model`` is called like ``Actor.forward`` and knows at least four tokens. All ranks call this together.
    transformers separates them where position ids start again, but not for every architecture and attention.
    """
    document, end = [2, 0, 1, 3], slice(3, 7)
    rows = [[0, 1, 2, *document], [3, 1, 0, *document], [*document, 0, 1, 2]]
    positions = [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]]
    sequences = torch.tensor(rows, device=device)
    everything = torch.ones_like(sequences, dtype=torch.bool)
    try:
        log_probs = model(sequences, everything, position_ids=torch.tensor(positions, device=device))
    except TypeError as error:
        logger.warning("documents are not packed: the model takes no position ids (%s)", error)
        return False
    after, after_another, first = log_probs[0, end], log_probs[1, end], log_probs[2, :4]
    leak = float((after - after_another)[1:].abs().max())
    shift = float((after - first)[1:].abs().max())
    exact = leak <= _LEAK and shift <= _NOISE
    if not exact:
        logger.warning(
            "documents are not packed: in one row they change each other's log-probs by %.2g, and their own by their "
            "place in the row by %.2g",
            leak,
            shift,
        )
    return exact


def _micro_batch(rows: Sequence[Sequence[TokenExample]], pad_token_id: int, with_positions: bool) -> TokenMicroBatch:
    sequences, attention_mask = pad_right([_joined([e.token_ids for e in row]) for row in rows], pad_token_id)
    loss_mask, _ = pad_right([_joined([[False, *e.loss_mask[1:]] for e in row]) for row in rows], 0)
    if not with_positions:
        return TokenMicroBatch(sequences, attention_mask, loss_mask.bool())
    position_ids = torch.arange(sequences.shape[1]).repeat(len(rows), 1)
    for row, documents in zip(position_ids, rows, strict=True):
        start = 0
        for document in documents:  # padding goes on from the last document, which keeps causal attention's fast path
            row[start:] = torch.arange(len(row) - start)
            start += len(document.token_ids)
    return TokenMicroBatch(sequences, attention_mask, loss_mask.bool(), position_ids)


def _joined(lists: Sequence[Sequence[int]]) -> list[int]:
    return [item for items in lists for item in items]
