"""Cutting of rows into micro-batches with little padding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class MicroBatchSize:
    """Limit of one forward: ``rows``, or as many rows as fit into ``tokens``, padding included.

    ``overhead`` is the cost of an extra micro-batch as a fraction of a full one: a split must save more padding.
    """

    rows: int
    tokens: int | None = None
    overhead: float = 1 / 8

    def rows_of(self, length: int) -> int:
        """Number of rows of ``length`` tokens that fit into one forward; at least one."""
        if self.tokens is None:
            return self.rows
        return max(1, self.tokens // max(1, length))

    def overhead_of(self, lengths: Sequence[int]) -> float:
        """Overhead in tokens of one more micro-batch, cut from rows of these lengths."""
        if self.tokens is not None:
            return self.overhead * self.tokens
        full = min(self.rows, len(lengths)) * max(lengths, default=0)
        return self.overhead * full

    def cut(self, lengths: Sequence[int], cost: Callable[[int, int], int]) -> list[tuple[int, int]]:
        """Cut rows of these lengths, in their order, at the least sum of cost and overhead.

        Returns the first row of each micro-batch and the end after its last. ``cost`` is the number of tokens that a
        forward from a first row to an end computes. Limits count the rows' own tokens if these are more, since memory
        for logits and keys grows with them.
        """
        n_rows = len(lengths)
        overhead = self.overhead_of(lengths)
        max_rows = self.rows if self.tokens is None else n_rows
        max_tokens = math.inf if self.tokens is None else self.tokens
        tokens_before = [*accumulate(lengths, initial=0)]

        # for rows from i on: their least cost, and the end of their first micro-batch
        least_costs = [0.0] * (n_rows + 1)
        ends = [n_rows] * (n_rows + 1)
        for first in reversed(range(n_rows)):
            least_costs[first] = math.inf
            for end in range(first + 1, n_rows + 1):
                n_tokens = cost(first, end)
                n_held = max(n_tokens, tokens_before[end] - tokens_before[first])
                n_in_batch = end - first
                if n_in_batch > 1 and (n_in_batch > max_rows or n_held > max_tokens):
                    break
                if n_tokens + least_costs[end] <= least_costs[first]:
                    least_costs[first] = n_tokens + least_costs[end]
                    ends[first] = end
            least_costs[first] += overhead

        cuts = []
        first = 0
        while first < n_rows:
            cuts.append((first, ends[first]))
            first = ends[first]
        return cuts


def split_overhead(zero_stage: int) -> float:
    """Overhead of an extra micro-batch; under ZeRO-3 a full one, so none is split off.

    Under ZeRO-3 each pass gathers all weights.
    """
    return 1.0 if zero_stage == 3 else MicroBatchSize.overhead


def micro_batches(lengths: Sequence[int], size: MicroBatchSize) -> list[list[int]]:
    """Indexes of sequences in batches of similar length, the longest first.

    The sorted sequences are cut so that padding and overhead are least; one above the limit has a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    falling = [lengths[i] for i in order]

    def padded_tokens(first: int, end: int) -> int:
        return (end - first) * falling[first]

    return [order[first:end] for first, end in size.cut(falling, padded_tokens)]
