"""Prompts to trajectories: several samples of each prompt, each with a seed of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from openppo.rollout.driver import EngineDriver, Leave
from openppo.rollout.engine import Engine
from openppo.tracking import Metrics
from openppo.types import (
    Comm,
    Completion,
    Interrupted,
    Prompt,
    SamplingParams,
    Score,
    StopCheck,
    Trajectory,
)


def _ignore(failed: Trajectory) -> None:
    """Take no note."""


def sample_seed(seed: int, number: int) -> int:
    """A seed for the ``number``-th sample of a run: the same whatever the ranks and batches it falls into."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)


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


class SampleRequest(NamedTuple):
    """``n_samples`` of each prompt, asked alike on all ranks.

    ``first_group`` is the number in the whole run of the first prompt; groups and seeds follow from it and ``seed``, so
    that a sample does not depend on the number of ranks. An ``evaluation`` keeps samples that failed; else
    ``note_failed`` gets a stand-in for each.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    n_samples: int
    seed: int
    first_group: int
    metrics: Metrics
    evaluation: bool = False
    note_failed: Callable[[Trajectory], None] = _ignore


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


class SamplerMaker(ABC):
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


@dataclass(frozen=True)
class EngineSampler:
    """One response of the engine to each sample of a prompt."""

    engine: Engine
    comm: Comm

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """This rank's share."""
        return sample_trajectories(self.engine, *asked[:5], self.comm)

    def close(self) -> None:
        """Hold nothing."""


def rank_share(
    prompts: Sequence[Prompt], first_group: int, comm: Comm
) -> tuple[Sequence[Prompt], int]:
    """This rank's share of ``prompts``, and the group of its first."""
    start, end = (rank * len(prompts) // comm.world_size for rank in (comm.rank, comm.rank + 1))
    return prompts[start:end], first_group + start


def sample_trajectories(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    n_samples: int,
    seed: int,
    first_group: int = 0,
    comm: Comm | None = None,
) -> list[Trajectory]:
    """``n_samples`` responses for each prompt, those of one prompt beside each other; with ``comm`` this rank's share.

    ``first_group`` is the number in the whole run of the first prompt; group and seeds follow from it, so that a
    response does not depend on the number of ranks.
    """
    if comm is not None:
        prompts, first_group = rank_share(prompts, first_group, comm)
    repeated = [
        (prompt, first_group + i) for i, prompt in enumerate(prompts) for _ in range(n_samples)
    ]
    seeds = [sample_seed(seed, first_group * n_samples + i) for i in range(len(repeated))]
    media = [prompt.media for prompt, _ in repeated]
    more = {"media": media} if any(media) else {}
    completions = engine.generate(
        [prompt.token_ids for prompt, _ in repeated], params, seeds, **more
    )
    sampled = zip(repeated, completions, strict=True)
    return [
        make_trajectory(prompt, made, group, stop=params.stop) for (prompt, group), made in sampled
    ]


def make_trajectory(
    prompt: Prompt, completion: Completion, group: int, stop: tuple[str, ...] = ()
) -> Trajectory:
    """A trajectory of one turn: prompt, then a completion whose every token is an action.

    ``stop`` are texts that end a response.
    """
    n_prompt, n_response = len(prompt.token_ids), len(completion.token_ids)
    return Trajectory(
        token_ids=prompt.token_ids + completion.token_ids,
        action_mask=[False] * n_prompt + [True] * n_response,
        log_probs=[0.0] * n_prompt + completion.log_probs,
        versions=[-1] * n_prompt + completion.versions,
        finish_reason=completion.finish_reason,
        prompt=prompt,
        group=group,
        stop=stop,
    )


def write_scores(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
    """Add each score to its trajectory. Token rewards outside the action mask become 0; those of turns are added."""
    for trajectory, score in zip(trajectories, scores, strict=True):
        trajectory.scores.update(score.rewards)
        trajectory.extras.update(score.extras)
        trajectory.notes.update(score.notes)
        trajectory.reward_error = score.error if score.failed else None
        if score.token_rewards is not None:
            rewards = zip(score.token_rewards, trajectory.action_mask, strict=True)
            given = [reward if is_action else 0.0 for reward, is_action in rewards]
            if trajectory.token_rewards is None or trajectory.step_ends is None:
                trajectory.token_rewards, trajectory.step_ends = given, score.step_ends
                continue
            trajectory.token_rewards = list(
                map(sum, zip(given, trajectory.token_rewards, strict=True))
            )
            ends = trajectory.action_mask if score.step_ends is None else score.step_ends
            trajectory.step_ends = list(map(any, zip(ends, trajectory.step_ends, strict=True)))


def episode_numbers(trajectories: Iterable[Trajectory]) -> list[int]:
    """The number of each trajectory's episode, counted from 0 in their order; one that is of none is alone."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [
        ("row", i) if t.episode is None else ("episode", id(t.episode))
        for i, t in enumerate(trajectories)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def by_episode(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The parts of each episode, both in order."""
    parts: dict[int, list[Trajectory]] = {}
    for number, trajectory in zip(episode_numbers(trajectories), trajectories, strict=True):
        parts.setdefault(number, []).append(trajectory)
    return list(parts.values())


def episode_reward(parts: Sequence[Trajectory], weights: Mapping[str, float]) -> float:
    """All that an episode earned: its score, which each of its ``parts`` has, and the rewards of all their tokens."""
    return parts[-1].total_score(weights) + sum(sum(part.token_rewards or []) for part in parts)


def whole_rewards(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> list[float]:
    """Reward of the whole episode that each trajectory is a part of."""
    numbers = episode_numbers(trajectories)
    rewards = [episode_reward(parts, weights) for parts in by_episode(trajectories)]
    return [rewards[number] for number in numbers]


class Rollout(list[Trajectory]):
    """This rank's trajectories of one step, whose scores may be under way: whoever reads one waits for them.

    Code that runs on several ranks calls ``wait_for_scores`` before it reads.
    ``metrics`` are what their source measured. ``write_scores`` blocks until scores are there and puts them into the
    trajectories. ``failed`` stand for a few episodes that are not trained on, for logs.
    """

    def __init__(
        self,
        unscored: Sequence[Trajectory],
        metrics: Metrics,
        write_scores: Callable[[], None] | None = None,
        failed: Sequence[Trajectory] = (),
    ) -> None:
        super().__init__(unscored)
        self.metrics = metrics
        self.failed = list(failed)
        self._write_scores = write_scores

    @property
    def unscored(self) -> list[Trajectory]:
        """The same trajectories at once, for work that needs no scores."""
        return list(super().__iter__())

    def wait(self) -> None:
        """Block until scores are there, on this rank alone; raise what the source of rewards raised."""
        if self._write_scores is not None:
            self._write_scores()
            self._write_scores = None

    def __iter__(self) -> Iterator[Trajectory]:
        self.wait()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.wait()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return [*self, *other]

    def __radd__(self, other: Any) -> Any:
        return [*other, *self]


def wait_for_scores(trajectories: Sequence[Trajectory], stop: StopCheck) -> None:
    """Block until scores are there, all ranks together; ``Interrupted`` on all if one of them has a signal."""
    if isinstance(trajectories, Rollout):
        with suppress(Interrupted):  # other ranks may not know of the signal yet
            trajectories.wait()
        stop()
