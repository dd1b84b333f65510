"""Cutting of rows into micro-batches with little padding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


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

    def overhead_of(self, lengths: Sequence[int]) -> float:
        """Of a micro-batch of rows of these lengths, in tokens."""
        rows = min(self.rows, len(lengths)) * max(lengths, default=0)
        return self.overhead * (rows if self.tokens is None else self.tokens)

    def cut(self, lengths: Sequence[int], cost: Callable[[int, int], int]) -> list[tuple[int, int]]:
        """Of all ways to cut rows of these lengths, in their order, the one of least cost and overhead.

        ``cost`` is the tokens that a forward of the rows from one index to before another computes. Limits count the
        rows' own tokens where these are more: memory for logits and keys follows them.
        """
        n, overhead = len(lengths), self.overhead_of(lengths)
        before = [*accumulate(lengths, initial=0)]
        least, ends = (
            [0.0] * (n + 1),
            [n] * (n + 1),
        )  # for rows i to n: the cost, and where the first forward ends
        for first in reversed(range(n)):
            least[first] = math.inf
            for end in range(first + 1, n + 1):
                tokens = cost(first, end)
                most = max(tokens, before[end] - before[first])
                if end > first + 1 and (
                    end - first > self.rows if self.tokens is None else most > self.tokens
                ):
                    break
                if tokens + least[end] <= least[first]:
                    least[first], ends[first] = tokens + least[end], end
            least[first] += overhead
        cuts, first = [], 0
        while first < n:
            cuts.append((first, ends[first]))
            first = ends[first]
        return cuts


def split_overhead(zero_stage: int) -> float:
    """Overhead of an extra micro-batch. Under ZeRO-3 each pass gathers all weights, so none is split off."""
    return 1.0 if zero_stage == 3 else MicroBatchSize.overhead


def micro_batches(lengths: Sequence[int], size: MicroBatchSize) -> list[list[int]]:
    """Indices of sequences in batches of similar length, the longest first.

    Of all ways to cut the sorted sequences, the one with the least padding and overhead; what is too long is alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    falling = [lengths[i] for i in order]
    return [
        order[slice(*cut)]
        for cut in size.cut(falling, lambda first, end: (end - first) * falling[first])
    ]
