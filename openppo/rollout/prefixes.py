"""Keys and values of ended requests, for requests that continue from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.rollout.memory import free_memory
from openppo.rollout.requests import Request

PARKED_BYTES_ON_CPU = 2 * 2**30
"""Most bytes that each process keeps on a CPU."""
_SHARE_OF_GPU = 0.25

States = list[tuple[Tensor, Tensor]]
"""Keys and values of a row's tokens in each layer, (heads, tokens, width) each."""


@dataclass(eq=False)
class _Kept:
    """Cached keys and values of a sequence; each of ``handles`` names the length of a prefix."""

    token_ids: tuple[int, ...]
    states: States
    handles: dict[int, int]

    @property
    def n_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.states)

    def pop_handles(self, most: int) -> dict[int, int]:
        """Remove and return the handles of prefixes of at most ``most`` tokens."""
        popped = {handle: n for handle, n in self.handles.items() if n <= most}
        self.handles = {handle: n for handle, n in self.handles.items() if n > most}
        return popped


class Prefixes:
    """Cache of keys and values; the least recently used are dropped when memory is full.

    A handle is the number of the request that ended. A request that continued from another has its states too, so these
    are kept once. ``reads_whole``: the model reads prompts with new images from their start.
    """

    def __init__(self, device: torch.device, reads_whole: bool = False) -> None:
        self.reads_whole = reads_whole
        self._device = device
        self._max_bytes: int | None = None
        self._n_bytes = 0
        self._by_handle: dict[int, _Kept] = {}
        self._by_use: dict[_Kept, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._by_use)

    def park(self, request: Request, states: States) -> int:
        """Keep the states of an ended request, for all but its last token; return the handle."""
        if self._max_bytes is None:
            free = free_memory(self._device)
            self._max_bytes = PARKED_BYTES_ON_CPU if free is None else int(_SHARE_OF_GPU * free)

        token_ids = (*request.prompt_ids, *request.token_ids[:-1])
        handles = {request.number: len(token_ids)}
        if request.n_kept > 0 and request.continue_from in self._by_handle:
            handles |= self._take_over(request.continue_from)

        kept = _Kept(token_ids, states, handles)
        self._by_handle |= dict.fromkeys(kept.handles, kept)
        self._by_use[kept] = None
        self._n_bytes += kept.n_bytes
        while self._n_bytes > self._max_bytes:
            self._drop(next(iter(self._by_use)))
        return request.number

    def _take_over(self, handle: int) -> dict[int, int]:
        """Remove ``handle`` and those of shorter prefixes from their states, and return them."""
        parent = self._by_handle[handle]
        handles = parent.pop_handles(parent.handles[handle])
        if not parent.handles:
            self._drop(parent)
        return handles

    def n_kept(self, request: Request) -> int:
        """Number of first tokens of a prompt that are kept under its handle; never the last.

        No image lies on both sides of the end of these tokens.
        """
        if request.continue_from is None:
            return 0
        kept = self._by_handle.get(request.continue_from)
        if kept is None:
            return 0
        ids = request.prompt_ids
        n = kept.handles[request.continue_from]
        if kept.token_ids[:n] != ids[:n]:
            return 0

        n = min(n, len(ids) - 1)
        images = [-1 - item.key for item in request.media]
        while True:
            cut = [key for key in images if ids.index(key) < n and key in ids[n:]]
            if not cut:
                break
            n = min(map(ids.index, cut))

        has_new_images = any(key in ids[n:] for key in images)
        return 0 if self.reads_whole and has_new_images else n

    def states(self, requests: Sequence[Request]) -> dict[tuple[int, ...], States]:
        """Kept states of ``requests``, in their order, by known tokens; empty where none are kept."""
        by_ids: dict[tuple[int, ...], States] = {}
        for request in requests:
            states = by_ids.setdefault(request.known_ids, [])
            if request.continue_from is None or request.n_kept == 0:
                continue

            kept = self._by_handle[request.continue_from]
            self._by_use[kept] = self._by_use.pop(kept)
            n = request.n_kept
            states[:] = [(keys[:, :n], values[:, :n]) for keys, values in kept.states]
        return by_ids

    def _drop(self, kept: _Kept) -> None:
        self._n_bytes -= kept.n_bytes
        del self._by_use[kept]
        for handle in kept.handles:
            del self._by_handle[handle]
