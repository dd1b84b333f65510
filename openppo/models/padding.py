"""Lists of token ids to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def micro_batches(lengths: Sequence[int], rows: int, tokens: int | None = None) -> list[list[int]]:
    """Indices of sequences in batches of neighbours in length, the longest first.

    A batch has at most ``rows`` of them, or with ``tokens`` as many as fit into that number of tokens, padding
    included; one that is longer has a batch of its own.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        last = batches[-1] if batches else []
        full = len(last) == rows if tokens is None else last and (len(last) + 1) * lengths[last[0]] > tokens
        if last and not full:
            last.append(i)
        else:
            batches.append([i])
    return batches


def pad_right(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the bool (B, L) mask of real tokens, from the lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    sequences = torch.full((len(rows), width), pad_token_id)
    for i, row in enumerate(rows):
        sequences[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return sequences, torch.arange(width) < lengths[:, None]
