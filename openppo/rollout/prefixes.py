"""Keys and values of ended requests, for requests that continue from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openppo.rollout.memory import free_memory
from openppo.rollout.requests import Request

PARKED_BYTES_ON_CPU = 2 * 2**30
"""What each process keeps at most; on a GPU it is a quarter of the memory that is free at the first."""


_SHARE_OF_GPU = 0.25


States = list[tuple[Tensor, Tensor]]
"""Keys and values of a row's tokens in each layer, (heads, tokens, width) each."""


@dataclass(eq=False)
class _Kept:
    """Tokens and their states. ``handles`` stand for so many of the first tokens each."""

    token_ids: tuple[int, ...]
    states: States
    handles: dict[int, int]

    @property
    def n_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.states)


class Prefixes:
    """States kept; the least recently used are dropped when memory is full.

    The number of the request that ended is the handle. A request that continued another has its states too, so these
    are kept once. ``reads_whole``: of a model whose prompts with new images are read whole.
    """

    def __init__(self, device: torch.device, reads_whole: bool = False) -> None:
        self._device, self.reads_whole = device, reads_whole
        self._most: int | None = None
        self._n_bytes = 0
        self._by_handle: dict[int, _Kept] = {}
        self._by_use: dict[_Kept, None] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._by_use)

    def park(self, request: Request, states: States) -> int:
        """Keep the states of a request that has ended, whose last token has none yet; returns the handle."""
        if self._most is None:
            free = free_memory(self._device)
            self._most = PARKED_BYTES_ON_CPU if free is None else int(_SHARE_OF_GPU * free)
        token_ids = (*request.prompt_ids, *request.token_ids[:-1])
        kept = _Kept(token_ids, states, {request.number: len(token_ids)})
        if request.n_kept > 0 and request.continue_from in self._by_handle:
            parent = self._by_handle[request.continue_from]
            shared = parent.handles[request.continue_from]
            kept.handles |= {handle: n for handle, n in parent.handles.items() if n <= shared}
            parent.handles = {handle: n for handle, n in parent.handles.items() if n > shared}
            if not parent.handles:
                self._drop(parent)
        self._by_handle |= dict.fromkeys(kept.handles, kept)
        self._by_use[kept] = None
        self._n_bytes += kept.n_bytes
        while self._n_bytes > self._most:
            self._drop(next(iter(self._by_use)))
        return request.number

    def n_kept(self, request: Request) -> int:
        """Tokens of a prompt that are kept: those of its handle, if it begins with them; never its last.

        What follows has whole images only.
        """
        if (
            request.continue_from is None
            or (kept := self._by_handle.get(request.continue_from)) is None
        ):
            return 0
        n, ids = kept.handles[request.continue_from], request.prompt_ids
        if kept.token_ids[:n] != ids[:n]:
            return 0
        n, images = min(n, len(ids) - 1), [-1 - item.key for item in request.media]
        while cut := [ids.index(key) for key in images if ids.index(key) < n and key in ids[n:]]:
            n = min(cut)
        return 0 if self.reads_whole and any(key in ids[n:] for key in images) else n

    def states(self, requests: Sequence[Request]) -> dict[tuple[int, ...], States]:
        """By known tokens, in the order of ``requests``, the states of those that are kept."""
        found: dict[tuple[int, ...], States] = {}
        for request in requests:
            states = found.setdefault(request.known_ids, [])
            if request.continue_from is not None and request.n_kept > 0:
                kept = self._by_handle[request.continue_from]
                self._by_use[kept] = self._by_use.pop(kept)
                n = request.n_kept
                states[:] = [(keys[:, :n], values[:, :n]) for keys, values in kept.states]
        return found

    def _drop(self, kept: _Kept) -> None:
        self._n_bytes -= kept.n_bytes
        del self._by_use[kept]
        for handle in kept.handles:
            del self._by_handle[handle]
