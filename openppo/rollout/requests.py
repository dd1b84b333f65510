"""Requests to an engine that decodes with a model's own module, and which of them are read together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openppo.types import SamplingParams

PREFILL_TOKENS = 4096
"""Prompt tokens of one forward pass, padding included, unless a single prompt has more."""
_ROOM_TO_REFILL = 1 / 8  # share of the rows that must be free before waiting requests interrupt the others


@dataclass
class Request:
    """A prompt, and what is sampled for it. ``park`` and ``resume`` as in ``Engine.submit``."""

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    uniforms: list[float]
    park: bool = False
    resume: int | None = None
    n_kept: int = 0  # of the prompt's tokens, whose keys and values need not be computed
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def n_unread(self) -> int:
        """Prompt tokens that a forward must read."""
        return len(self.prompt_ids) - self.n_kept


def longest(requests: Sequence[Request]) -> int:
    """Tokens that the longest of these may have."""
    return max(len(request.prompt_ids) + request.params.max_new_tokens for request in requests)


class Queue(list[Request]):
    """Requests that wait for a row."""

    _filling = False

    def take(self, running: int, rows: int, n_kept: Callable[[Request], int]) -> list[Request]:
        """Take out the first, as many as one forward should read; none if too few rows are free to interrupt others.

        So many of the ``rows`` are ``running``. ``n_kept`` tells how many of a prompt's tokens need not be read; equal
        prompts are read once.
        """
        free = rows - running
        enough = 1 if self._filling else max(1, _ROOM_TO_REFILL * rows)
        self._filling = free >= min(len(self), enough) > 0
        n_taken, width = 0, 0
        prompts: set[tuple[int, ...]] = set()
        for request in self[:free] if self._filling else ():
            request.n_kept = n_kept(request)
            length = request.n_unread
            n_tokens = len(prompts | {request.prompt_ids}) * max(width, length)
            wasteful = len(prompts) * width > PREFILL_TOKENS / 4 and not 0.8 * width < length <= width
            if n_taken > 0 and (n_tokens > PREFILL_TOKENS or wasteful):
                break
            prompts.add(request.prompt_ids)
            width = max(width, length)
            n_taken += 1
        taken = self[:n_taken]
        del self[:n_taken]
        return taken
