"""Several short documents in one row: less padding, fewer forwards, the same log-probs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from openppo.datasets import TokenExample

logger = logging.getLogger("openppo")

_ROW_LENGTH = 512
"""Attention costs more in longer rows, and shorter ones waste more places."""
_LEAK = 1e-5
_NOISE = 0.05
"""Log-probs of one document at two places of a row differ by less than this, in bfloat16 too."""


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
