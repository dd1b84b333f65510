"""Which rows go through a model together: micro-batches with little padding or repetition, equal shares of ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from openppo.media import Media
from openppo.types import Comm

_WORTH_DEALING = 1.2
"""Tokens of the fullest rank before over those after: below, small models may win less than sending rows costs.

That took 0.4 to 0.6 us for each token of all ranks, measured between processes on two busy CPU cores.
"""


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


def deal(lengths: Sequence[int], n_shares: int) -> list[list[int]]:
    """Indexes of sequences in shares that differ by at most one sequence and by no more tokens than the longest has."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True)
    rounds = [order[start : start + n_shares] for start in range(0, len(order), n_shares)]
    shares: list[list[int]] = [[] for _ in range(n_shares)]
    for i, dealt in enumerate(rounds):  # to and fro
        for share, index in zip(shares if i % 2 == 0 else reversed(shares), dealt, strict=False):
            share.append(index)
    return shares


class Deal:
    """Rows of all ranks, dealt over the ranks by tokens where that relieves the fullest one.

    ``lengths`` are those of this rank's rows, ``prompts`` the group of each and how many tokens precede its actions:
    groups stay together where the fullest rank computes no more for it. Rows are tensors (N, L), N the same for all.
    Collective.
    """

    def __init__(
        self, lengths: Sequence[int], comm: Comm, prompts: Sequence[tuple[int, int]] = ()
    ) -> None:
        of_ranks = comm.all_gather_object([*zip_longest(lengths, prompts)])
        self.comm = comm
        self.lengths = [length for of_rank in of_ranks for length, _ in of_rank]
        self.prompts = [
            prompt for of_rank in of_ranks for _, prompt in of_rank if prompt is not None
        ]
        stops = accumulate(map(len, of_ranks))
        self.own = [
            [*range(stop - len(of_rank), stop)]
            for of_rank, stop in zip(of_ranks, stops, strict=True)
        ]
        dealt = deal(self.lengths, comm.world_size)
        if self.prompts:
            dealt = min((self._by_groups(), dealt), key=self._most)
        self.shares = (
            dealt if self._most(self.own) > _WORTH_DEALING * self._most(dealt) else self.own
        )

    def out(self, rows: list[Tensor]) -> list[Tensor]:
        """This rank's share, for its own ``rows``."""
        return self._moved(rows, self.own, self.shares)

    def back(self, rows: list[Tensor]) -> list[Tensor]:
        """This rank's own rows, for those of its share."""
        return self._moved(rows, self.shares, self.own)

    def media(self, media: Sequence[Media]) -> list[Media]:
        """Images of the rows of this rank's share, for those of its own rows."""
        if self.shares == self.own:
            return [*media]
        gathered = self.comm.all_gather_object([*media] if any(media) else None)
        held = dict[int, Media]()
        for places, of_rank in zip(self.own, gathered, strict=True):
            held.update(zip(places, of_rank or [()] * len(places), strict=True))
        return [held[place] for place in self.shares[self.comm.rank]]

    def _by_groups(self) -> list[list[int]]:
        """Shares of whole groups."""
        groups: dict[int, list[int]] = {}
        for place, (group, _) in enumerate(self.prompts):
            groups.setdefault(group, []).append(place)
        units = list(groups.values())
        dealt = deal([self._tokens(unit) for unit in units], self.comm.world_size)
        return [[place for unit in share for place in units[unit]] for share in dealt]

    def _tokens(self, share: Sequence[int]) -> int:
        """Tokens that a rank computes for these rows; prompts of one length count once in a group."""
        prompts = [self.prompts[place] for place in share] if self.prompts else []
        repeated = sum(n for _, n in prompts) - sum(n for _, n in set(prompts))
        return sum(self.lengths[place] for place in share) - repeated

    def _most(self, shares: list[list[int]]) -> int:
        return max(map(self._tokens, shares))

    def _moved(
        self, rows: list[Tensor], held: list[list[int]], wanted: list[list[int]]
    ) -> list[Tensor]:
        """The rows at the places ``wanted`` on this rank, where each rank has those that it has ``held``."""
        if held == wanted:
            return rows
        found: dict[int, Tensor] = {}
        gathered = self.comm.all_gather_object(torch.cat(rows, -1).cpu() if rows else None)
        for places, joined in zip(held, gathered, strict=True):
            if joined is not None:
                found.update(
                    zip(places, joined.split([self.lengths[i] for i in places], -1), strict=True)
                )
        return [found[place] for place in wanted[self.comm.rank]]


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
