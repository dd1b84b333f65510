"""Micro-batches of one rank, as many as every other rank has."""

from collections.abc import Sequence

import torch

from openppo.models.batching import MicroBatchSize, micro_batches
from openppo.models.prefix_batches import shared_plan
from openppo.types import Comm


def equal_batches(
    lengths: Sequence[int], size: MicroBatchSize, comm: Comm, rows: Sequence[list[int]] = ()
) -> list[list[int]]:
    """Indexes of rows in micro-batches, equally many on all ranks; rows of length 0 are left out. Collective.

    Given ``rows``, rows that share prefixes are batched together where that pays; in all other cases the longest come
    first. Partitioned weights require equally many forwards, so the rank with the most batches sets their number, and
    the last batches of other ranks are empty.
    """
    filled = [i for i, length in enumerate(lengths) if length > 0]
    filled_lengths = [lengths[i] for i in filled]
    plan = shared_plan([rows[i] for i in filled], 1, size) if rows else None
    batches = micro_batches(filled_lengths, size) if plan is None else plan[0]

    indexes = []
    for batch in batches:
        indexes.append([filled[k] for k in batch])

    n_batches = int(comm.all_reduce(torch.tensor(len(batches)), "max"))
    n_missing = n_batches - len(batches)
    return indexes + [[] for _ in range(n_missing)]
