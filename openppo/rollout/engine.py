"""Generation engines: the protocol, and the loop over their steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from openppo.rollout.sampling import Decode
from openppo.tracking import progress_bar
from openppo.types import Completion, SamplingParams


class WeightSource(Protocol):
    """Weights of the trained policy, for an engine to sample with. All ranks call every method together."""

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        """Inside, the policy's own module may be called: by each rank alone, or ``in_lockstep`` by all together."""
        ...

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole weight, one by one, of the Hugging Face model, adapters added."""
        ...


class Engine(Protocol):
    """Token ids in; token ids, log-probs of the distribution sampled from, and finish reason out.

    Requests enter one by one with ``submit``; each ``step`` advances what is under way by one forward pass;
    ``collect`` hands out what has ended. ``generate`` runs that loop for a batch. ``version`` counts the policy's
    updates; the owner of the weights sets it. Stop strings need ``decode``. All of it takes place inside
    ``with_weights``.
    """

    version: int
    decode: Decode | None

    @property
    def busy(self) -> bool:
        """True while a request waits or is being decoded."""
        ...

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Queue a request and return its number. The response depends on ``seed``, not on its neighbours."""
        ...

    def step(self) -> None:
        """One forward pass: decode, or take in waiting requests."""
        ...

    def collect(self) -> dict[int, Completion]:
        """Completions that ended since the last call, by request number."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Submit all, step until all ended; completions in the order of ``prompts``."""
        ...

    def with_weights(self, weights: WeightSource) -> AbstractContextManager[None]:
        """Inside, the engine may decode, with the weights of now, on each rank by itself or in lockstep."""
        ...


def drain(
    engine: Engine, place: Mapping[int, int], has_work: Callable[[], bool], show_progress: bool
) -> dict[int, Completion]:
    """Step while ``has_work()``; the completions that ended, by the ``place`` of their request numbers."""
    done: dict[int, Completion] = {}
    with progress_bar(len(place), "generation", enabled=show_progress) as bar:
        while has_work():
            engine.step()
            ended = engine.collect()
            done |= {place[number]: completion for number, completion in ended.items()}
            bar.update(len(ended))
    return done
