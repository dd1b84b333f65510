"""The interface of generation engines, and the loop over their steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any, Protocol

from torch import Tensor

from openppo.media import Media
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.rollout.sampling import Decode
from openppo.tracking import progress_bar
from openppo.types import Completion, SamplingParams, StopCheck


class WeightSource(Protocol):
    """Weights of the policy for an engine. All ranks call every method together."""

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Gather the policy's weights, with adapters perhaps merged.

        Inside, each rank may call the module alone, or ``in_lockstep`` all together.
        """

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole weight, one by one, of the Hugging Face model with merged adapters."""


class Engine(ABC):
    """Token ids in; token ids, log-probs of the distribution sampled from, and finish reason out.

    Requests enter one by one with ``submit``; each ``step`` advances them by one forward pass; ``collect`` returns
    completions that have ended. ``generate`` runs that loop for a batch; ``stop`` makes it raise ``Interrupted``. All
    of this takes place inside ``with_weights``.

    ``version`` counts the policy's global steps; the owner of the weights sets it. Running requests continue with new
    weights, and each token is recorded with its version. The owner also sets ``decode``, which makes the text that is
    searched for stop strings, and ``sampled_ids``, the ids that the policy's log-probs are over. An engine that sizes
    itself does so by ``free`` bytes (None: by the memory that is free when it starts to decode).

    ``any_rank`` puts ranks in lockstep (None: each decodes by itself): it combines their ``busy`` before each step, and
    an idle rank takes part in every step.

    ``read_tokens`` counts prompt tokens of all requests so far, ``reused_tokens`` those whose keys and values were
    kept.
    """

    decode: Decode | None = None
    sampled_ids: SampledIds = ALL_IDS
    free: int | None = None

    def __init__(
        self,
        show_progress: bool = False,
        stop: StopCheck | None = None,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        self.show_progress = show_progress
        self.any_rank = any_rank
        self.stop = stop or StopCheck()
        self.version = 0
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
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
        media: Media = (),
    ) -> int:
        """Queue a request and return its number.

        Its response depends on ``seed``, not on its neighbours. ``media`` are the images of the prompt.

        With ``park`` keys and values of prompt and response are kept, while memory allows it and until the weights
        change; ``Completion.parked`` is their handle. ``continue_from`` is the handle of tokens that the prompt begins
        with, which are then not read again.
        """

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Drop a request and free its row; nothing happens if it has ended."""

    @abstractmethod
    def step(self) -> None:
        """Run one forward pass: decode, or read the prompts of waiting requests."""

    @abstractmethod
    def with_weights(self, weights: WeightSource) -> AbstractContextManager[None]:
        """Load the current weights; inside, ranks may decode, each by itself or in lockstep."""

    @abstractmethod
    def _drop_all(self) -> None:
        """Forget all requests."""

    def collect(self) -> dict[int, Completion]:
        """Return completions that ended since the last call, by request number."""
        ended = self._ended
        self._ended = {}
        return ended

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        media: Sequence[Media] = (),
    ) -> list[Completion]:
        """Sample a completion of each prompt, in their order; request i has ``seeds[i]`` and ``media[i]``."""
        numbers: dict[int, int] = {}
        for i in self.order(prompts):
            images: dict[str, Any] = {"media": media[i]} if media else {}
            numbers[i] = self.submit(prompts[i], params, seeds[i], **images)

        completions: dict[int, Completion] = {}
        with progress_bar(len(prompts), "generation", enabled=self.show_progress) as bar:
            while self._has_work():
                self.step()
                ended = self.collect()
                completions |= ended
                bar.update(len(ended))
        self.stop()
        return [completions[numbers[i]] for i in range(len(prompts))]

    def order(self, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
        """Indexes of prompts in the order of their submission."""
        return range(len(prompts))

    def _has_work(self) -> bool:
        if self.stop.requested():
            self._drop_all()
        return self._anywhere(self.busy)

    def _anywhere(self, flag: bool) -> bool:
        """True if ``flag`` is true on this rank or one in lockstep with it."""
        return flag if self.any_rank is None else self.any_rank(flag)
