"""Token examples to one rank's micro-batches of an optimizer step, for SFT and the PTX loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.datasets import TokenExample, shard
from openppo.models.padding import pad_right
from openppo.types import Comm

Tensors = tuple[Tensor, Tensor, Tensor]
_IDLE = TokenExample(token_ids=[0, 0], loss_mask=[False, False])


@dataclass(frozen=True)
class TokenBatch:
    """Micro-batches of (sequences, attention mask, loss mask), each (B, L), equally many on all ranks.

    ``n_tokens`` counts the target tokens of the whole step. The first token of an example is never a target.
    """

    micro_batches: list[Tensors]
    n_tokens: int

    @property
    def n_input_tokens(self) -> int:
        """Real tokens that this rank feeds to the model."""
        return sum(int(attention_mask.sum()) for _, attention_mask, _ in self.micro_batches)

    def to(self, device: torch.device) -> Iterator[Tensors]:
        """The micro-batches, one after the other on ``device``."""
        for sequences, attention_mask, loss_mask in self.micro_batches:
            yield sequences.to(device), attention_mask.to(device), loss_mask.to(device)


def token_batch(examples: Sequence[TokenExample], micro_batch_size: int, pad_token_id: int, comm: Comm) -> TokenBatch:
    """This rank's share of ``examples``, which are those of the whole step and the same on all ranks."""
    micro_batches = []
    for rows in equal_micro_batches(examples, micro_batch_size, comm):
        rows = rows or [_IDLE]
        sequences, attention_mask = pad_right([row.token_ids for row in rows], pad_token_id)
        loss_mask, _ = pad_right([row.loss_mask for row in rows], 0)
        loss_mask[:, 0] = 0
        micro_batches.append((sequences, attention_mask, loss_mask.bool()))
    return TokenBatch(micro_batches, n_tokens=sum(sum(example.loss_mask[1:]) for example in examples))


def equal_micro_batches(examples: Sequence, micro_batch_size: int, comm: Comm) -> list[list]:
    """This rank's share of ``examples`` in micro-batches; empty ones at the end where other ranks have more."""
    mine = shard(examples, comm.rank, comm.world_size)
    largest = -(-len(examples) // comm.world_size)
    starts = range(0, max(largest, 1), micro_batch_size)
    return [list(mine[start : start + micro_batch_size]) for start in starts]
