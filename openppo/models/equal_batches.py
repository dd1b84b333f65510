"""Micro-batches of one rank, as many as every other rank has."""

from collections.abc import Sequence

import torch

from openppo.models.batching import MicroBatchSize, micro_batches
from openppo.models.prefix_batches import shared_plan
from openppo.types import Comm


def equal_batches(
    lengths: Sequence[int], size: MicroBatchSize, comm: Comm, rows: Sequence[list[int]] = ()
) -> list[list[int]]:
    """Indexes of rows in ``micro_batches``; rows of length 0 are in none.

    With ``rows`` those that begin alike are together where it pays; else the longest come first. As many batches as the
    rank with the most has, as partitioned weights demand: the last may be empty. Collective.
    """
    real = [i for i in range(len(lengths)) if lengths[i] > 0]
    plan = shared_plan([rows[i] for i in real], 1, size) if rows else None
    batches = micro_batches([lengths[i] for i in real], size) if plan is None else plan[0]
    batches = [[real[k] for k in batch] for batch in batches]
    n_batches = int(comm.all_reduce(torch.tensor(len(batches)), "max"))
    return batches + [[] for _ in range(n_batches - len(batches))]
