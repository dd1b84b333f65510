"""Requests of an in-process engine: the queue, and the states kept of ended ones."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openppo.media import Media
from openppo.models.media_inputs import model_inputs, rope_positions
from openppo.models.padding import pad_right
from openppo.types import SamplingParams

_PREFILL_ON_CPU, _PREFILL_ON_GPU = 4096, 16384
_ROOM_TO_REFILL = (
    1 / 8
)  # share of the rows that must be free before waiting requests interrupt the others
PARKED_BYTES_ON_CPU = 2 * 2**30
"""What each process keeps at most; on a GPU it is a quarter of the memory that is free at the first."""
_SHARE_OF_GPU = 0.25

States = list[tuple[Tensor, Tensor]]
"""Keys and values of a row's tokens in each layer, (heads, tokens, width) each."""


@dataclass
class Request:
    """A prompt, and what is sampled for it. ``park`` and ``resume`` as in ``Engine.submit``.

    ``prompt_ids`` are ``distinct_ids``, so that prompts are equal where their images are.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    uniforms: Tensor  # float64, one for each token at most
    park: bool = False
    resume: int | None = None
    media: Media = ()
    n_kept: int = 0  # of the prompt's tokens, whose keys and values need not be computed
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """The prompt, and what was sampled before the weights changed: what a forward reads before the next token."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def n_unread(self) -> int:
        """Tokens that a forward must read."""
        return len(self.prompt_ids) + len(self.token_ids) - self.n_kept


def prefill_tokens(on_cpu: bool) -> int:
    """Prompt tokens of one forward pass, padding included, unless a single prompt has more."""
    return _PREFILL_ON_CPU if on_cpu else _PREFILL_ON_GPU


def reads_whole(model: Any) -> bool:
    """Whether images attend both ways, which a forward gives them only where it reads a prompt from its start."""
    return "token_type_ids" in inspect.signature(type(model).forward).parameters


def whole_images(
    model: Any, prompts: Sequence[Sequence[int]], media: Sequence[Media], width: int
) -> int:
    """``width`` or more, so that no image is cut before the last tokens of ``prompts``, which are ``distinct_ids``.

    With an image of a ``model`` that ``reads_whole`` it is all tokens.
    """
    reaches = []  # tokens of a prompt that are behind an image, and those from its first on
    for ids, of_prompt in zip(prompts, media, strict=True):
        keys = [-1 - item.key for item in of_prompt]
        reaches += [(ids[::-1].index(key), len(ids) - ids.index(key)) for key in keys]
    if any(behind < width for behind, _ in reaches) and reads_whole(model):
        return max(map(len, prompts))
    while cut := [first for behind, first in reaches if behind < width < first]:
        width = max(cut)
    return width


def padded_left(
    model: Any,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media],
    width: int,
    where: dict[str, Any],
) -> tuple[Tensor, list[int]]:
    """Ids (prompts, width) of the last tokens of ``prompts``, which are ``distinct_ids``, padded with 0 on the left.

    Adds to ``where``, the inputs of a forward over them, what ``model`` gets for those of their ``media`` that are
    among these. Also returns how far the positions of tokens that follow are above their places.
    """
    real = {-1 - item.key: item.token_id for of_prompt in media for item in of_prompt}
    rows = [[real.get(i, i) for i in prompt] for prompt in prompts]
    ids = torch.tensor(
        [([0] * width + row)[-width:] for row in rows], device=where["position_ids"].device
    )
    shifts, seeing = [0] * len(rows), [i for i, of_prompt in enumerate(media) if of_prompt]
    if not seeing:
        return ids, shifts
    last = [prompt[-width:] for prompt in prompts]
    shown = [
        tuple(item for item in of if -1 - item.key in seen)
        for of, seen in zip(media, last, strict=True)
    ]
    where |= model_inputs(model, ids, shown)
    right, _ = pad_right([rows[i] for i in seeing], 0)
    places = rope_positions(model, right, [media[i] for i in seeing])
    if places is not None:
        where["position_ids"] = where["position_ids"].expand(3, -1, -1).clone()
        for k, i in enumerate(seeing):
            own = places[:, k, : len(rows[i])]
            where["position_ids"][:, i, -len(rows[i]) :] = own[:, -width:]
            shifts[i] = int(own.max()) + 1 - len(rows[i])
    return ids, shifts


def longest(requests: Sequence[Request]) -> int:
    """Tokens that the longest of these may have."""
    return max(len(request.prompt_ids) + request.params.max_new_tokens for request in requests)


class Queue(list[Request]):
    """Requests that wait for a row."""

    _filling = False

    def take(
        self, running: int, rows: int, n_kept: Callable[[Request], int], most: int
    ) -> list[Request]:
        """Take out the first, as many as one forward should read; none if too few rows are free to interrupt others.

        ``running`` counts the taken ``rows``. ``n_kept`` tells how many of a prompt's tokens need not be read; equal
        prompts are read once. ``most`` tokens are read.
        """
        free = rows - running
        enough = 1 if self._filling else max(1, _ROOM_TO_REFILL * rows)
        self._filling = free >= min(len(self), enough) > 0
        n_taken, width = 0, 0
        prompts: set[tuple[int, ...]] = set()
        for request in self[:free] if self._filling else ():
            request.n_kept = n_kept(request)
            length = request.n_unread
            n_tokens = len(prompts | {request.known_ids}) * max(width, length)
            wasteful = len(prompts) * width > most / 4 and not 0.8 * width < length <= width
            if n_taken > 0 and (n_tokens > most or wasteful):
                break
            prompts.add(request.known_ids)
            width = max(width, length)
            n_taken += 1
        taken = self[:n_taken]
        del self[:n_taken]
        return taken


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
        """Tokens of a prompt that are kept: those of its handle, if it begins with them; never its last.

        What follows has whole images only.
        """
        if request.resume is None or (kept := self._by_handle.get(request.resume)) is None:
            return 0
        n, ids = kept.handles[request.resume], request.prompt_ids
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
