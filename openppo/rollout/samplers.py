"""Interfaces of samplers and of their factories."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from openppo.rollout.driver import EngineDriver, Leave
from openppo.rollout.engine import Engine
from openppo.rollout.sample_request import SampleRequest
from openppo.tracking import Metrics
from openppo.types import Comm, Prompt, Sample, SamplingParams, StopCheck


@dataclass(frozen=True)
class SamplerParts:
    """Parts of a custom sampler. ``longest`` bounds the tokens of a prompt with its response.

    ``has_rewards``: sources of rewards score the samples, or none is needed. ``leave`` is what ``EngineDriver.drive``
    does with running requests of others when a batch of samples is complete. ``driver`` is shared by the samplers of
    several tasks. ``vision`` (a ``datasets.media.Vision``) reads images of agents, if they may have any.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: Sequence[int]
    comm: Comm
    stop: StopCheck
    longest: int
    context: int | None = None
    has_rewards: bool = True
    leave: Leave = "abandon"
    driver: EngineDriver | None = None
    vision: Any = None

    def own_driver(self) -> EngineDriver:
        """Return ``driver``, or a new one if there is none."""
        return self.driver or EngineDriver(self.engine, self.stop)


class Sampler(Protocol):
    """Interface of samplers: prompts in, samples without scores out. All ranks call every method together."""

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Return this rank's share of the samples, those of one prompt beside each other."""

    def close(self) -> None:
        """Release resources."""


class SampleFailed(Exception):  # noqa: N818 (it says nothing about the policy)
    """A sample that cannot be trained on, and why; ``sample`` stands for it in logs."""

    def __init__(self, message: str, sample: Sample | None = None) -> None:
        super().__init__(message)
        self.sample = sample


class SingleSampler(Sampler, Protocol):
    """Interface of samplers that can also make one sample at a time, inside ``EngineDriver.drive``."""

    @property
    def driver(self) -> EngineDriver:
        """The driver whose ``drive`` runs coroutines such as ``sample_one``."""

    async def start(self) -> None:
        """Prepare for ``sample_one``."""

    async def end(self) -> None:
        """Release the resources of ``start``."""

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Metrics,
    ) -> Sample:
        """Return one unscored sample; ``SampleFailed`` if it cannot be trained on.

        It is not collective. ``env_seed`` is the seed of an environment, the same for all samples of a ``group``.
        """


class Players(ABC):
    """Factory of a custom sampler, such as one that plays episodes of agents.

    ``gives_rewards``: no source of rewards is needed. ``needs_prompts``: rows must have a prompt.
    """

    gives_rewards = False
    needs_prompts = True

    @abstractmethod
    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``ValueError`` for options that cannot work, before any model is loaded."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 (most take any)
        """Raise ``ValueError`` for rows that cannot be used, before any model is loaded."""

    @abstractmethod
    def make(self, parts: SamplerParts) -> SingleSampler:
        """Make the sampler from loaded ``parts``."""
