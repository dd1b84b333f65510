"""Token examples to one rank's micro-batches, for SFT and the PTX loss; rows that are packed where that is exact.

Several documents may share a row, and several samples an unpadded one: less padding, the same log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openppo.datasets import TokenExample, shard
from openppo.models.actor import Actor
from openppo.models.padding import pad_right
from openppo.models.scalar_head import ScalarHeadModel
from openppo.types import Comm

logger = logging.getLogger("openppo")

PACKED_ROW = 512
"""Length of packed rows: attention costs more in longer ones, and shorter ones waste more places."""
_LEAK, _NOISE = 1e-5, 0.05
"""Bounds of changes by another row or document, and by padding or place in the row, in bfloat16 too."""
_IDLE = TokenExample(token_ids=[0, 0], loss_mask=[False, False])


class TokenMicroBatch(NamedTuple):
    """Rows of one forward, all (B, L): ``sequences`` int64, masks bool.

    ``position_ids`` int64 restart at 0 at each document of a packed row (None: a row is one document).
    """

    sequences: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None

    def to(self, device: torch.device) -> TokenMicroBatch:
        """A copy on ``device``."""
        return TokenMicroBatch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TokenBatch:
    """Micro-batches, equally many on all ranks; ``n_tokens`` counts the targets of the whole step."""

    micro_batches: list[TokenMicroBatch]
    n_tokens: int

    @property
    def n_input_tokens(self) -> int:
        """Real tokens of this rank."""
        return sum(int(micro.attention_mask.sum()) for micro in self.micro_batches)

    def to(self, device: torch.device) -> Iterator[TokenMicroBatch]:
        """The micro-batches, each moved to ``device`` when it is its turn."""
        return (micro.to(device) for micro in self.micro_batches)


def token_batch(
    examples: Sequence[TokenExample],
    micro_batch_size: int,
    pad_token_id: int,
    comm: Comm,
    pack_to: int | None = None,
) -> TokenBatch:
    """This rank's share of a step's ``examples``, given alike on all ranks; those without a target are left out.

    A micro-batch has ``micro_batch_size`` rows. A row is one example, or as many as fit into ``pack_to`` tokens. The
    first token of an example is never a target.
    """
    examples = [example for example in examples if any(example.loss_mask[1:])]
    rows = [[example] for example in examples] if pack_to is None else pack(examples, pack_to)
    micro_batches = [
        _micro_batch(micro or [[_IDLE]], pad_token_id, with_positions=pack_to is not None)
        for micro in equal_micro_batches(rows, micro_batch_size, comm)
    ]
    return TokenBatch(micro_batches, n_tokens=sum(sum(example.loss_mask[1:]) for example in examples))


def equal_micro_batches(examples: Sequence, micro_batch_size: int, comm: Comm) -> list[list]:
    """This rank's share of ``examples`` in micro-batches, with empty ones where other ranks have more."""
    mine = shard(examples, comm.rank, comm.world_size)
    largest = -(-len(examples) // comm.world_size)
    starts = range(0, max(largest, 1), micro_batch_size)
    return [list(mine[start : start + micro_batch_size]) for start in starts]


def pack(examples: Sequence[TokenExample], max_len: int) -> list[list[TokenExample]]:
    """``examples`` in rows of at most ``max_len`` tokens, the longest first, each in the first row with room.

    A longer example has a row of its own.
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
    """Length of rows that ``documents`` share: 512 if ``limit`` allows it, or their longest.

    None without documents, or if ``model`` does not keep them apart.
    """
    if not documents or not packing_is_exact(model, device):
        return None
    return max(min(PACKED_ROW, limit), max(len(document.token_ids) for document in documents))


@torch.no_grad()
def packing_is_exact(model: Callable[..., Tensor], device: torch.device) -> bool:
    """Whether ``model`` keeps documents of one row apart, by one tiny forward; logs why not.

    ``model`` is called like ``Actor.forward``, by all ranks together. transformers separates documents where position
    ids restart, but not for every architecture and attention.
    """
    document, end = [2, 0, 1, 3], slice(3, 7)
    sequences = torch.tensor([[0, 1, 2, *document], [3, 1, 0, *document], [*document, 0, 1, 2]], device=device)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]], device=device)
    try:
        log_probs = model(sequences, torch.ones_like(sequences, dtype=torch.bool), position_ids=positions)
    except TypeError as error:
        logger.warning("documents are not packed: the model takes no position ids (%s)", error)
        return False
    after, after_another, first = log_probs[0, end], log_probs[1, end], log_probs[2, :4]
    return _is_exact("documents are not packed", (after - after_another)[1:], (after - first)[1:])


@torch.no_grad()
def pack_where_exact(
    module: Actor | ScalarHeadModel, forward: Callable[[Tensor, Tensor], Tensor], device: torch.device, name: str
) -> None:
    """Have ``module`` put a batch's samples into one unpadded row if they stay apart there, by tiny forwards.

    ``forward`` is the module or the engine around it, called by all ranks together. Kernels for unequal lengths, such
    as FlashAttention-2's, compute no padding then.
    """
    rows = torch.tensor([[0, 1, 2, 3, 0], [2, 0, 1, 3, 3]], device=device)
    others = torch.tensor([[3, 1, 0, 2, 0], [2, 0, 1, 3, 3]], device=device)
    mask = torch.tensor([[True, True, True, True, False], [True] * 5], device=device)
    padded = forward(rows, mask)
    module.packs_rows = True
    try:
        packed, beside_another = forward(rows, mask), forward(others, mask)
    except TypeError as error:
        logger.warning("samples of the %s are padded: the model takes no position ids (%s)", name, error)
        module.packs_rows = False
        return
    scale = max(1.0, float(padded.abs().max()))
    leak = (packed - beside_another)[1]
    module.packs_rows = _is_exact(f"samples of the {name} are padded", leak, packed - padded, scale)


def _is_exact(otherwise: str, leak: Tensor, shift: Tensor, scale: float = 1.0) -> bool:
    """Whether differences are rounding: by other documents (``leak``), and by padding or place (``shift``)."""
    most_leak, most_shift = float(leak.abs().max()), float(shift.abs().max())
    exact = most_leak <= _LEAK and most_shift <= _NOISE * scale
    if not exact:
        logger.warning(
            "%s: in one row they change each other's outputs by %.2g, and their own by their place by %.2g",
            *(otherwise, most_leak, most_shift),
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
        for document in documents:  # padding continues the last document, for causal attention's fast path
            row[start:] = torch.arange(len(row) - start)
            start += len(document.token_ids)
    return TokenMicroBatch(sequences, attention_mask, loss_mask.bool(), position_ids)


def _joined(lists: Sequence[Sequence[int]]) -> list[int]:
    return [item for items in lists for item in items]
