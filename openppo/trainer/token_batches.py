"""Token examples to one rank's micro-batches of an optimizer step, for SFT and the PTX loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openppo.datasets import TokenExample, shard
from openppo.models.padding import pad_right
from openppo.trainer.packing import pack
from openppo.types import Comm

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
        return TokenMicroBatch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore


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
