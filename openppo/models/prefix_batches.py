"""Micro-batches whose rows share prefixes."""

from collections.abc import Sequence
from itertools import accumulate

from openppo.models.batching import MicroBatchSize
from openppo.models.dealing import deal

LEAST_SHARED = 16
"""Tokens of a beginning that is worth a node of its own: attention runs once more for each."""
_WORTH_SHARING = 1.1
"""Tokens computed otherwise over those with beginnings shared: below, what attention costs more may not pay."""


def shared_order(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Indexes of rows so that those that begin alike are neighbours; tokens that each shares with the one before."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [0] * len(rows)
    for at in range(1, len(order)):
        one, other = rows[order[at - 1]], rows[order[at]]
        most = min(len(one), len(other))
        low, high = 0, most  # equal up to ``low``, not up to more than ``high``
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
            )
        shared[at] = low if low >= LEAST_SHARED else 0
    return order, shared


def pays(n_shared: int, n_otherwise: int) -> bool:
    """Whether ``n_shared`` tokens, computed with beginnings shared, are enough fewer."""
    return 0 < n_shared * _WORTH_SHARING <= n_otherwise


def shared_plan(
    rows: Sequence[list[int]], n_shares: int, size: MicroBatchSize
) -> list[list[list[int]]] | None:
    """Micro-batches of ``n_shares`` ranks whose rows begin alike; None where that saves too little.

    Rows that begin alike are on one rank, unless the fullest rank has less to do otherwise.
    """
    lengths = [len(row) for row in rows]
    order, shared, new = _in_order(rows)
    runs = [order[start:end] for start, end in _equal_runs(new, shared, n_shares)]
    dealt = deal(lengths, n_shares)

    def batches(shares: list[list[int]]) -> tuple[list[list[list[int]]], int, float]:
        """Of each share, the most tokens of one, and the same with the overhead of as many micro-batches as one has."""
        made = [
            [[share[k] for k in b] for b in _shared_batches([rows[i] for i in share], size)]
            for share in shares
        ]
        most = max(sum(_in_order([rows[i] for i in b])[2][-1] for b in share) for share in made)
        return made, most, most + size.overhead_of(lengths) * max(map(len, made))

    best, most, _ = min((batches(shares) for shares in (runs, dealt)), key=lambda found: found[2])
    return best if pays(most, max(sum(lengths[i] for i in share) for share in dealt)) else None


def _equal_runs(new: Sequence[int], shared: Sequence[int], n_shares: int) -> list[tuple[int, int]]:
    """Runs of rows in the order of ``shared_order``, one for each share, of which the fullest computes least.

    ``new`` are sums of the tokens that rows do not share with the one before; the first row of a run is whole.
    """

    def runs(most: int) -> list[tuple[int, int]]:
        found, first = list[tuple[int, int]](), 0
        for end in range(1, len(shared) + 1):
            if end == len(shared) or new[end + 1] - new[first] + shared[first] > most:
                found.append((first, end))
                first = end
        return found

    low, high = 0, new[-1]  # too little for n_shares runs, and enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(runs(middle)) <= n_shares else (middle, high)
    found = runs(high)
    return found + [(0, 0)] * (n_shares - len(found))


def _shared_batches(rows: Sequence[list[int]], size: MicroBatchSize) -> list[list[int]]:
    """Indexes of rows in micro-batches whose rows begin alike where they can."""
    order, shared, new = _in_order(rows)
    cuts = size.cut(
        [len(rows[i]) for i in order], lambda first, end: new[end] - new[first] + shared[first]
    )
    return [order[slice(*cut)] for cut in cuts]


def _in_order(rows: Sequence[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """``shared_order``, and sums of the tokens that rows do not share with the one before, from 0 on."""
    order, shared = shared_order(rows)
    added = (len(rows[i]) - common for i, common in zip(order, shared, strict=True))
    return order, shared, [*accumulate(added, initial=0)]
