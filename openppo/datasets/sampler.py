"""Order of the data, a function of epoch and position alone.

So any run can resume, and all ranks agree.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain, count, islice
from typing import TypeVar

import torch

T = TypeVar("T")
Order = Callable[[int], Sequence[int]]
"""``order(epoch)``: the row indexes of a pass, as many as there are rows."""


def shuffled(n_rows: int, seed: int) -> Order:
    """Order in which each pass has every row once, shuffled anew.

    >>> sorted(shuffled(3, seed=42)(0))
    [0, 1, 2]
    """
    return partial(_permutation, n_rows, seed)


class BatchSampler:
    """Batches of row indexes, over all ranks; ``len()`` is their number per epoch.

    Each epoch has its own ``order``. The last batch is smaller when ``batch_size`` does not divide ``n_rows``.
    """

    def __init__(self, n_rows: int, batch_size: int, order: Order) -> None:
        self.n_rows = n_rows
        self.batch_size = batch_size
        self.order = order

    def __len__(self) -> int:
        return -(-self.n_rows // self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the global row indexes of each batch of ``epoch``, from batch ``start`` (0 to ``len(self)``) on."""
        if not 0 <= start <= len(self):
            raise ValueError(
                f"no batch {start} in epoch {epoch}: an epoch has {len(self)} batches."
            )

        order = self.order(epoch)
        size = self.batch_size
        starts = range(start * size, len(self) * size, size)
        return (list(order[first : first + size]) for first in starts)


def cyclic_batches(
    n_rows: int, batch_size: int, order: Order, start: int = 0
) -> Iterator[list[int]]:
    """Yield endless full batches of row indexes, from batch number ``start`` on.

    They run through passes in their ``order`` without gaps: a batch may begin in one pass and end in the next.
    """
    epoch, offset = divmod(start * batch_size, n_rows)
    passes = map(order, count(epoch))
    indexes = islice(chain.from_iterable(passes), offset, None)
    return (list(islice(indexes, batch_size)) for _ in count())


def shard(batch: Sequence[T], rank: int, world_size: int) -> list[T]:
    """Part of ``batch`` for ``rank``: contiguous, in rank order; sizes differ by one at most.

    >>> [shard(range(5), rank, world_size=2) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    n = len(batch)
    start = rank * n // world_size
    end = (rank + 1) * n // world_size
    return list(batch[start:end])


@lru_cache(maxsize=2)
def _permutation(n_rows: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(n_rows, generator=generator).tolist()
