"""Players, which make one sample at a time, and their factories."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from openppo.rollout.driver import EngineDriver
from openppo.types import Comm, Ending, Episode, EpisodeInput, Prompt, Sample, SamplingParams


class Player(Protocol):
    """Maker of samples, as coroutines of its driver's loop; any number of them may be played at the same time."""

    async def start(self) -> None:
        """Get ready, once, before the first sample."""

    async def play(self, task: EpisodeInput, params: SamplingParams) -> Sample:
        """Return one sample without scores of reward sources.

        One that cannot be trained on is a stand-in (``Sample.failed``), whose episode says why.
        """

    async def end(self) -> None:
        """Release what ``start`` took."""


@dataclass(frozen=True)
class PlayerParts:
    """Parts of a player on this rank.

    ``longest`` bounds the tokens of a prompt with its response, or of an episode. ``has_rewards``: sources of rewards
    score the samples, or none is needed. ``vision`` (a ``datasets.media.Vision``) reads images of agents, if they may
    have any.
    """

    driver: EngineDriver
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: Sequence[int]
    comm: Comm
    longest: int
    context: int | None = None
    has_rewards: bool = True
    vision: Any = None


class Players(ABC):
    """Factory of a player, such as one of agents' episodes.

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
    def make(self, parts: PlayerParts) -> Player:
        """Make the player from loaded ``parts``."""


@dataclass(frozen=True)
class ResponsePlayer:
    """Player of single responses."""

    driver: EngineDriver

    async def start(self) -> None:
        """Do nothing."""

    async def play(self, task: EpisodeInput, params: SamplingParams) -> Sample:
        """Sample one response; a prompt that the engine refuses is a failed sample."""
        try:
            completion = await self.driver.generate(task.prompt, params, task.seed, park=False)
        except ValueError as error:
            return Sample.failed(task, Episode([], Ending.AGENT_ERROR, n_turns=0, error=str(error)))
        return Sample.of_response(task.prompt, completion, task.group, stop=params.stop)

    async def end(self) -> None:
        """Do nothing."""
