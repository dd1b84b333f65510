"""Lists of token ids to padded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_right(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Sequences int64 (B, L) padded on the right, and the bool (B, L) mask of real tokens, from the lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    sequences = torch.full((len(rows), width), pad_token_id)
    for i, row in enumerate(rows):
        sequences[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return sequences, torch.arange(width) < lengths[:, None]
