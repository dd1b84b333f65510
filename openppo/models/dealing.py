"""Dealing of rows between ranks."""

from collections.abc import Sequence
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from openppo.media import Media
from openppo.types import Comm

_WORTH_DEALING = 1.2
"""Tokens of the fullest rank before over those after: below, small models may win less than sending rows costs.

That took 0.4 to 0.6 us for each token of all ranks, measured between processes on two busy CPU cores.
"""


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
