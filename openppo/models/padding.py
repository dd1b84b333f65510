"""Token ids to padded tensors, padded tensors to packed rows, and batches with little padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from openppo.models.pretrained import context_length


@dataclass(frozen=True)
class MicroBatchSize:
    """Limit of one forward: ``rows``, or as many as fit into ``tokens``, padding included.

    ``overhead`` of an extra micro-batch is a fraction of a full one: a batch is split if that much padding is saved.
    """

    rows: int
    tokens: int | None = None
    overhead: float = 1 / 8

    def rows_of(self, length: int) -> int:
        """Rows of ``length`` tokens in one forward; at least one."""
        return self.rows if self.tokens is None else max(1, self.tokens // max(1, length))


def split_overhead(zero_stage: int) -> float:
    """Overhead of an extra micro-batch. Under ZeRO-3 each pass gathers all weights, so none is split off."""
    return 1.0 if zero_stage == 3 else MicroBatchSize.overhead


def micro_batches(lengths: Sequence[int], size: MicroBatchSize) -> list[list[int]]:
    """Indices of sequences in batches of similar length, the longest first.

    Of all ways to cut the sorted sequences, the one with the least padding and overhead; what is too long is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    n, longest = len(order), max(lengths, default=0)
    overhead = size.overhead * (min(size.rows, n) * longest if size.tokens is None else size.tokens)
    least, ends = [0.0] * (n + 1), [n] * (n + 1)  # for sequences i to n: the cost, and where the first batch ends
    for first in reversed(range(n)):
        length = lengths[order[first]]
        candidates = range(first + 1, min(first + size.rows_of(length), n) + 1)
        ends[first] = min(reversed(candidates), key=lambda end: (end - first) * length + least[end])
        least[first] = (ends[first] - first) * length + least[ends[first]] + overhead
    batches, first = [], 0
    while first < n:
        batches.append(order[first : ends[first]])
        first = ends[first]
    return batches


def pad_right(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the mask of real tokens, bool (B, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    sequences = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], True, pad_token_id)
    return sequences, torch.arange(sequences.shape[1]) < lengths[:, None]


def rounded_width(length: int) -> int:
    """Next multiple of 8, or of a larger power of 2 for long rows; at most a sixteenth, or 7, above ``length``."""
    step = max(8, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step


def pad_width(sequences: Tensor, model: Any) -> Tensor:
    """Pad ``sequences`` int64 (B, L) to (B, ``rounded_width(L)``) on CPUs in bfloat16, within the model's positions.

    oneDNN compiles matrix products for each new shape, keeps a thousand of them, and is faster with even ones.
    """
    length = sequences.shape[1]
    if sequences.device.type != "cpu" or model.dtype is not torch.bfloat16:
        return sequences
    positions, width = context_length(model.config), rounded_width(length)
    return sequences if positions is not None and width > positions else F.pad(sequences, (0, width - length))


class PackedRows(NamedTuple):
    """Real tokens of a batch (B, L) in one row of T."""

    input_ids: Tensor  # int64 (1, T)
    position_ids: Tensor  # int64 (1, T), from 0 in each row of the batch
    places: Tensor  # int64 (B x L,) of the batch's tokens in the row (padding: of the last real token before it)


def pack_rows(sequences: Tensor, attention_mask: Tensor) -> PackedRows:
    """``sequences`` int64 (B, L) padded on the right, ``attention_mask`` bool (B, L)."""
    real = attention_mask.bool().flatten()  # (B x L,)
    positions = torch.arange(sequences.shape[1], device=sequences.device).repeat(len(sequences))
    places = (real.cumsum(0) - 1).clamp(min=0)
    return PackedRows(sequences.flatten()[real][None], positions[real][None], places)
