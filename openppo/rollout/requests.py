"""Requests of an in-process engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from openppo.media import Media
from openppo.types import Completion, FinishReason, SamplingParams


@dataclass
class Request:
    """A prompt and its response so far. ``park`` and ``continue_from`` as in ``Engine.submit``.

    ``prompt_ids`` are ``distinct_ids``, so that prompts are equal only if their images are.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    uniforms: Tensor
    """A float64 number for each token of the longest response."""
    park: bool = False
    continue_from: int | None = None
    media: Media = ()
    n_kept: int = 0
    """First tokens of the prompt whose keys and values are kept, so that no forward reads them."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def known_ids(self) -> tuple[int, ...]:
        """Prompt and tokens sampled before the weights changed: the context of the next token."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def n_unread(self) -> int:
        """Number of tokens that a forward must read."""
        return len(self.prompt_ids) + len(self.token_ids) - self.n_kept

    def reuse(self, n_kept: int) -> None:
        """Take the keys and values of the first ``n_kept`` tokens from those that are kept."""
        self.n_kept = n_kept

    def completion(self, reason: FinishReason, parked: int | None) -> Completion:
        """Return the response, which has ended; ``parked`` is the handle of its keys and values."""
        return Completion(
            self.token_ids,
            self.log_probs,
            self.versions,
            finish_reason=reason,
            parked=parked,
        )


def longest(requests: Sequence[Request]) -> int:
    """Largest number of tokens that one of ``requests`` may have, prompt and response."""
    return max(len(request.prompt_ids) + request.params.max_new_tokens for request in requests)
