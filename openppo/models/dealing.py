"""Dealing of rows between ranks."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from openppo.media import Media
from openppo.types import Comm

_WORTH_DEALING = 1.2
"""Deal rows only if the largest rank's tokens fall by this factor; otherwise sending may cost more.

Sending took 0.4 to 0.6 us for each token of all ranks, measured between processes on two busy CPU cores.
"""


def deal(lengths: Sequence[int], n_shares: int) -> list[list[int]]:
    """Indexes of sequences in equal shares.

    Shares differ by at most one sequence and by no more tokens than the longest has.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    shares: list[list[int]] = [[] for _ in range(n_shares)]
    receivers = shares
    for start in range(0, len(order), n_shares):
        dealt = order[start : start + n_shares]
        for share, index in zip(receivers, dealt, strict=False):
            share.append(index)
        receivers = receivers[::-1]  # back and forth
    return shares


class Deal:
    """Rows of all ranks, dealt out by tokens if that relieves the rank with the most tokens.

    ``lengths`` are those of this rank's rows; ``prompts`` holds each row's group and its number of tokens before the
    actions. Groups stay together unless that gives the fullest rank more to compute. Rows are tensors (N, L) with the
    same N. Collective.
    """

    def __init__(
        self, lengths: Sequence[int], comm: Comm, prompts: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.comm = comm
        self.lengths: list[int] = []
        self.prompts: list[tuple[int, int]] = []
        self.own: list[list[int]] = []
        """Places of each rank's own rows among the rows of all ranks; ``shares`` has the places dealt to it."""
        for rank_rows in comm.all_gather_object([*zip_longest(lengths, prompts)]):
            start = len(self.lengths)
            self.own.append([*range(start, start + len(rank_rows))])
            for length, prompt in rank_rows:
                self.lengths.append(length)
                if prompt is not None:
                    self.prompts.append(prompt)

        dealt = deal(self.lengths, comm.world_size)
        if self.prompts:
            dealt = min((self._by_groups(), dealt), key=self._most)
        pays = self._most(self.own) > _WORTH_DEALING * self._most(dealt)
        self.shares = dealt if pays else self.own

    def out(self, rows: list[Tensor]) -> list[Tensor]:
        """Send this rank's own ``rows`` to the ranks they are dealt to; return its share."""
        return self._moved(rows, self.own, self.shares)

    def back(self, rows: list[Tensor]) -> list[Tensor]:
        """Send the ``rows`` of this rank's share back; return its own rows."""
        return self._moved(rows, self.shares, self.own)

    def media(self, media: Sequence[Media]) -> list[Media]:
        """Send the images of this rank's own rows to the ranks they are dealt to; return those of its share."""
        if self.shares == self.own:
            return [*media]

        media_by_place: dict[int, Media] = {}
        gathered = self.comm.all_gather_object([*media] if any(media) else None)
        for places, rank_media in zip(self.own, gathered, strict=True):
            if not rank_media:
                rank_media = [()] * len(places)
            media_by_place.update(zip(places, rank_media, strict=True))
        return [media_by_place[place] for place in self.shares[self.comm.rank]]

    def _by_groups(self) -> list[list[int]]:
        """Shares of whole groups."""
        places_by_group: dict[int, list[int]] = {}
        for place, (group, _) in enumerate(self.prompts):
            places_by_group.setdefault(group, []).append(place)

        groups = list(places_by_group.values())
        group_tokens = [self._tokens(places) for places in groups]
        shares = []
        for dealt in deal(group_tokens, self.comm.world_size):
            shares.append([place for group in dealt for place in groups[group]])
        return shares

    def _tokens(self, share: Sequence[int]) -> int:
        """Tokens that a rank computes for these rows; prompts of one length count once in a group."""
        n_tokens = sum(self.lengths[place] for place in share)
        if not self.prompts:
            return n_tokens
        prompts = [self.prompts[place] for place in share]
        n_in_prompts = sum(n for _, n in prompts)
        n_in_distinct_prompts = sum(n for _, n in set(prompts))
        return n_tokens - (n_in_prompts - n_in_distinct_prompts)

    def _most(self, shares: list[list[int]]) -> int:
        """Tokens of the fullest share."""
        return max(map(self._tokens, shares))

    def _moved(
        self, rows: list[Tensor], senders: list[list[int]], receivers: list[list[int]]
    ) -> list[Tensor]:
        """Send ``rows`` between ranks, from their current places to their new ones.

        ``senders`` and ``receivers`` list places by rank; returns the rows at this rank's places in ``receivers``.
        """
        if senders == receivers:
            return rows

        rows_by_place: dict[int, Tensor] = {}
        joined_rows = torch.cat(rows, -1).cpu() if rows else None
        gathered = self.comm.all_gather_object(joined_rows)
        for places, joined in zip(senders, gathered, strict=True):
            if joined is not None:
                split = joined.split([self.lengths[place] for place in places], -1)
                rows_by_place.update(zip(places, split, strict=True))
        return [rows_by_place[place] for place in receivers[self.comm.rank]]
