"""Requests of an in-process engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from openppo.media import Media
from openppo.types import SamplingParams


@dataclass
class Request:
    """A prompt, and what is sampled for it. ``park`` and ``continue_from`` as in ``Engine.submit``.

    ``prompt_ids`` are ``distinct_ids``, so that prompts are equal where their images are.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    uniforms: Tensor  # float64, one for each token at most
    park: bool = False
    continue_from: int | None = None
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


def longest(requests: Sequence[Request]) -> int:
    """Tokens that the longest of these may have."""
    return max(len(request.prompt_ids) + request.params.max_new_tokens for request in requests)
