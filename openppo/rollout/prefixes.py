"""Keys and values of requests that have ended, kept for requests whose prompts begin with their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """What is kept, all of weights of one ``version``; where memory is full, the least recently used go.

    The number of the request that ended is the handle. A request that continued another has its states too, so these
    are kept once.
    """

    def __init__(self, version: int, device: torch.device) -> None:
        self._device = device
        self.clear(version)

    def clear(self, version: int) -> None:
        """Drop all; what comes is of weights of this version."""
        self.version = version
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
        if request.n_kept > 0 and request.resume in self._by_handle:
            parent = self._by_handle[request.resume]
            shared = parent.handles[request.resume]
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
        """Tokens of a prompt that are kept: those of its handle, if it begins with them; never its last."""
        if request.resume is None or (kept := self._by_handle.get(request.resume)) is None:
            return 0
        n = kept.handles[request.resume]
        return min(n, len(request.prompt_ids) - 1) if kept.token_ids[:n] == request.prompt_ids[:n] else 0

    def states(self, requests: Sequence[Request]) -> dict[tuple[int, ...], States]:
        """By prompt, in the order of ``requests``, the states of its tokens that are kept."""
        found: dict[tuple[int, ...], States] = {}
        for request in requests:
            states = found.setdefault(request.prompt_ids, [])
            if request.resume is not None and request.n_kept > 0:
                kept = self._by_handle[request.resume]
                self._by_use[kept] = self._by_use.pop(kept)
                n = request.n_kept
                states[:] = [(keys[:, :n], values[:, :n]) for keys, values in kept.states]
        return found

    def _drop(self, kept: _Kept) -> None:
        self._n_bytes -= kept.n_bytes
        del self._by_use[kept]
        for handle in kept.handles:
            del self._by_handle[handle]


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a GPU, with what torch's allocator gives back; None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
