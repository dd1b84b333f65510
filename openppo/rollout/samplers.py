"""Interfaces of samplers, and the parts that they are made of."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from openppo.rollout.driver import EngineDriver, Leave
from openppo.rollout.engine import Engine
from openppo.rollout.sample_request import SampleRequest
from openppo.tracking import Metrics
from openppo.types import (
    Comm,
    Prompt,
    SamplingParams,
    StopCheck,
    Trajectory,
)


@dataclass(frozen=True)
class SamplerParts:
    """What a sampler works with. ``longest`` is the most tokens that a prompt and its response may have.

    ``has_rewards`` tells whether sources of rewards score what is sampled. ``leave`` is what ``EngineDriver.drive``
    does with requests of others that are under way when a batch of samples is complete. ``driver`` is shared by the
    samplers of several tasks. ``vision`` (a ``datasets.media.Vision``) reads images of agents, if they may have any.
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
        """The driver that is given, or a new one."""
        return self.driver or EngineDriver(self.engine, self.stop)


class Sampler(Protocol):
    """How prompts become trajectories without scores. All ranks call every method together."""

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """This rank's share, those of one prompt beside each other."""

    def close(self) -> None:
        """Release what it holds."""


class SampleFailed(Exception):  # noqa: N818 (it says nothing about the policy)
    """A sample that cannot be trained on; the message says why, and ``trajectory`` stands for it in logs."""

    def __init__(self, message: str, trajectory: Trajectory | None = None) -> None:
        super().__init__(message)
        self.trajectory = trajectory


class SingleSampler(Sampler, Protocol):
    """A sampler that also makes one sample at a time, while the engine of its driver is driven."""

    @property
    def driver(self) -> EngineDriver:
        """Its ``drive`` runs coroutines, ``sample_one`` among them."""

    async def start(self) -> None:
        """Get ready for ``sample_one``."""

    async def end(self) -> None:
        """Release what ``start`` took."""

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Metrics,
    ) -> list[Trajectory]:
        """The parts of one unscored sample; ``SampleFailed`` if it cannot be trained on. Not collective.

        ``env_seed`` is that of an environment, the same for the samples of one ``group``.
        """


class Players(ABC):
    """Makes a sampler of a kind of its own, from parts that a trainer or an evaluation has loaded.

    ``gives_rewards``: no source of rewards is needed. ``needs_prompts``: rows must have a prompt.
    """

    gives_rewards = False
    needs_prompts = True

    @abstractmethod
    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """``ValueError`` naming the option for what cannot work, before any model is loaded."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 (most take any)
        """``ValueError`` for rows that cannot be used, before any model is loaded."""

    @abstractmethod
    def make(self, parts: SamplerParts) -> SingleSampler:
        """The sampler."""
