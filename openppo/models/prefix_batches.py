"""Micro-batches whose rows share prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from openppo.models.batching import MicroBatchSize
from openppo.models.dealing import deal

LEAST_SHARED = 16
"""Shortest prefix worth sharing: each costs one attention call."""
_WORTH_SHARING = 1.1
"""Share prefixes only if tokens fall by this factor; otherwise attention may cost more than it saves."""


def shared_order(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Sort indexes of rows so that shared prefixes are neighbours; return lengths shared with the row before."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [0] * len(rows)
    for position in range(1, len(order)):
        n_shared = _common_length(rows[order[position - 1]], rows[order[position]])
        if n_shared >= LEAST_SHARED:
            shared[position] = n_shared
    return order, shared


def _common_length(row: list[int], other: list[int]) -> int:
    """Length of the longest common prefix, by bisection."""
    low = 0  # equal up to here
    high = min(len(row), len(other))  # not equal beyond
    while low < high:
        middle = (low + high + 1) // 2
        if row[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def pays(n_shared: int, n_otherwise: int) -> bool:
    """True if sharing prefixes, with ``n_shared`` tokens instead of ``n_otherwise``, saves enough of them."""
    return 0 < n_shared * _WORTH_SHARING <= n_otherwise


@dataclass(frozen=True)
class _PrefixOrder:
    """Rows in the order of ``shared_order``, to be cut into runs."""

    order: list[int]
    shared: list[int]
    """Length of the prefix that each row shares with the row before."""
    new_before: list[int]
    """Running sum of the tokens not shared in this way: over the rows before each, and last over all rows."""

    @classmethod
    def of(cls, rows: Sequence[list[int]]) -> "_PrefixOrder":
        """Sort ``rows``."""
        order, shared = shared_order(rows)
        lengths = [len(rows[i]) for i in order]
        n_new = map(sub, lengths, shared)
        return cls(order, shared, new_before=[*accumulate(n_new, initial=0)])

    def n_tokens(self, first: int, end: int) -> int:
        """Tokens computed for the run of rows from ``first`` to before ``end``, with the first row in full."""
        return self.new_before[end] - self.new_before[first] + self.shared[first]


@dataclass(frozen=True)
class _Plan:
    """Micro-batches of each share of ``rows``."""

    batches: list[list[list[int]]]
    """Indexes of rows, by share and micro-batch."""
    n_tokens: int
    """Tokens computed for the fullest share."""
    cost: float
    """``n_tokens`` plus overhead for the number of micro-batches in the share that has the most."""

    @classmethod
    def of(
        cls, rows: Sequence[list[int]], shares: list[list[int]], size: MicroBatchSize
    ) -> "_Plan":
        """Cut each share at the least cost."""
        batches = []
        n_tokens = 0
        for share in shares:
            share_batches = _shared_batches(rows, share, size)
            batches.append(share_batches)
            n_tokens = max(n_tokens, sum(_n_tokens(rows, batch) for batch in share_batches))

        overhead = size.overhead_of([len(row) for row in rows])
        n_batches = max(map(len, batches))
        return cls(batches, n_tokens, cost=n_tokens + overhead * n_batches)


def shared_plan(
    rows: Sequence[list[int]], n_shares: int, size: MicroBatchSize
) -> list[list[list[int]]] | None:
    """Micro-batches of ``n_shares`` ranks, whose rows share prefixes; None if that saves too little.

    Rows that share a prefix are on one rank, unless splitting them leaves less work for the fullest rank.
    """
    lengths = [len(row) for row in rows]
    dealt = deal(lengths, n_shares)
    n_otherwise = 0
    for share in dealt:
        n_otherwise = max(n_otherwise, sum(lengths[i] for i in share))

    by_prefix = _Plan.of(rows, _prefix_shares(rows, n_shares), size)
    by_length = _Plan.of(rows, dealt, size)
    best = min(by_prefix, by_length, key=lambda plan: plan.cost)
    return best.batches if pays(best.n_tokens, n_otherwise) else None


def _prefix_shares(rows: Sequence[list[int]], n_shares: int) -> list[list[int]]:
    """Cut indexes of rows into runs of neighbours, one per share, the fullest with as few tokens as possible."""
    prefix_order = _PrefixOrder.of(rows)
    too_few = 0  # a limit of tokens that makes more runs than shares
    enough = prefix_order.new_before[-1]
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if len(_runs(prefix_order, middle)) <= n_shares:
            enough = middle
        else:
            too_few = middle

    shares = [prefix_order.order[first:end] for first, end in _runs(prefix_order, enough)]
    n_empty = n_shares - len(shares)
    return shares + [[] for _ in range(n_empty)]


def _runs(prefix_order: _PrefixOrder, max_tokens: int) -> list[tuple[int, int]]:
    """First row and end of each run of at most ``max_tokens``; a longer row is a run of its own."""
    n_rows = len(prefix_order.order)
    runs = []
    first = 0
    for end in range(1, n_rows + 1):
        if end == n_rows or prefix_order.n_tokens(first, end + 1) > max_tokens:
            runs.append((first, end))
            first = end
    return runs


def _shared_batches(
    rows: Sequence[list[int]], share: list[int], size: MicroBatchSize
) -> list[list[int]]:
    """Indexes of the rows of ``share`` in micro-batches whose rows share prefixes where they can."""
    prefix_order = _PrefixOrder.of([rows[i] for i in share])
    sorted_share = [share[k] for k in prefix_order.order]
    lengths = [len(rows[i]) for i in sorted_share]
    return [sorted_share[first:end] for first, end in size.cut(lengths, prefix_order.n_tokens)]


def _n_tokens(rows: Sequence[list[int]], batch: list[int]) -> int:
    """Tokens computed for a batch of rows with shared prefixes."""
    return _PrefixOrder.of([rows[i] for i in batch]).new_before[-1]
