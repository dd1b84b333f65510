"""The interface of generation engines, and the loop over their steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Protocol

from torch import Tensor

from openppo.media import Tokens
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.rollout.sampling import Decode
from openppo.types import Completion, SamplingParams


class WeightSource(Protocol):
    """Weights of the policy for an engine. All ranks call every method together."""

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Gather the policy's weights; adapters may be merged.

        Inside, each rank may call the module by itself; ``in_lockstep`` all ranks must call it together.
        """

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and full tensor of each weight of the Hugging Face model, adapters merged."""


class Engine(ABC):
    """Token ids in; token ids, log-probs of the distribution sampled from, and finish reason out.

    ``submit`` queues one request, each ``step`` advances all by one forward pass, and ``collect`` returns completions
    that have ended. ``generate`` runs that loop for a batch. Call all of these inside ``with_weights``.

    With ``any_rank``, ranks decode in lockstep (None: each by itself): it combines their ``busy`` before each step, and
    an idle rank takes part in every step. ``sampled_ids`` are the ids over which the policy's log-probs are normalized.
    ``decode`` turns ids into the text that is searched for stop strings.

    ``version`` counts the policy's global steps. Running requests continue with new weights, and each token is recorded
    with its version. An engine that sizes itself fits its rows into ``free`` bytes (None: into the memory that is free
    when it starts to decode).

    ``read_tokens`` counts the prompt tokens of all requests so far, ``reused_tokens`` those read from the cache.
    """

    def __init__(
        self,
        any_rank: Callable[[bool], bool] | None = None,
        sampled_ids: SampledIds = ALL_IDS,
        decode: Decode | None = None,
    ) -> None:
        self.any_rank = any_rank
        self.sampled_ids = sampled_ids
        self.decode = decode
        self.version = 0
        self.free: int | None = None
        self.read_tokens = self.reused_tokens = 0
        self._numbers = count()
        self._ended: dict[int, Completion] = {}

    @property
    @abstractmethod
    def busy(self) -> bool:
        """True while a request waits or is being decoded."""

    @abstractmethod
    def submit(
        self,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
    ) -> int:
        """Queue a request and return its number.

        The response depends on ``seed``, not on other requests.

        With ``park``, keys and values of prompt and response are kept while memory allows it, at most until the weights
        change; ``Completion.parked`` is their handle. ``continue_from`` is such a handle: the prompt must begin with
        its tokens, which are not read again.
        """

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop a request and free its row; no effect if it has ended."""

    @abstractmethod
    def step(self) -> None:
        """Run one forward pass: decode, or read the prompts of waiting requests."""

    @abstractmethod
    def with_weights(self, weights: WeightSource) -> AbstractContextManager[None]:
        """Load the current weights; inside, ranks may decode, each by itself or in lockstep."""

    def use_version(self, version: int) -> None:
        """Record further tokens with ``version``, the number of the weights that sample them."""
        self.version = version

    def fit_into(self, free: int | None) -> None:
        """Fit rows into ``free`` bytes, if the engine sizes itself."""
        self.free = free

    def collect(self) -> dict[int, Completion]:
        """Return completions that ended since the last call, by request number."""
        ended = self._ended
        self._ended = {}
        return ended

    def generate(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Sample a completion of each prompt, in their order; request i has ``seeds[i]``."""
        numbers = {i: self.submit(prompts[i], params, seeds[i]) for i in self.order(prompts)}

        completions: dict[int, Completion] = {}
        while self._anywhere(self.busy):
            self.step()
            completions |= self.collect()
        return [completions[numbers[i]] for i in range(len(prompts))]

    def order(self, prompts: Sequence[Tokens]) -> Sequence[int]:
        """Return the indexes of prompts in the order of submission."""
        return range(len(prompts))

    def _anywhere(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on this rank or, in lockstep, on any other."""
        return flag if self.any_rank is None else self.any_rank(flag)
