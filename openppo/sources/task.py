"""Tasks of a run. A run without ``--tasks`` has one, without a name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol
from zlib import crc32

from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets.orders import prompt_order
from openppo.datasets.sampler import Order, cyclic_batches
from openppo.experience.estimators import Estimator
from openppo.experience.group_filters import useful_groups
from openppo.experience.own_estimator import estimator_of
from openppo.rewards import Scorer
from openppo.rewards.scoring import TaskScorer
from openppo.rollout.players import Player, PlayerParts, Players, ResponsePlayer
from openppo.rollout.sampling import sampling_params
from openppo.rollout.seeds import sample_seed
from openppo.sources.groups import GroupInput
from openppo.sources.progress import Ratios, TaskProgress
from openppo.types import Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class Task:
    """A task of a run: prompts, their player, rewards, estimator, ratio and limits.

    ``config`` are the run's options with the task's own. ``players`` make its player, None stands for single
    responses. ``scorer`` is None if the player gives the rewards. ``ratio`` is its share of the trained episodes,
    ``max_concurrent`` bounds its running episodes on all ranks, and an asynchronous run plays a failed episode again up
    to ``retries`` times. ``fields`` are those with which a program has registered it.

    >>> task = Task("", config_of("--pretrain", "MODEL", "--n_samples_per_prompt", "2"))
    >>> task.group(Prompt("17 + 25 =", [5, 6]), index=3, number=3).n_samples
    2
    """

    name: str
    config: TrainPPOConfig
    players: Players | None = None
    prompts: Sequence[Prompt] = ()
    held_out: Sequence[Prompt] = ()
    scorer: Scorer | None = None
    ratio: float = 1.0
    max_concurrent: int | None = None
    retries: int = 2
    fields: Mapping[str, Any] | None = None

    @property
    def gives_rewards(self) -> bool:
        """True if samples need no source of rewards, because their player rewards them."""
        return self.players is not None and self.players.gives_rewards

    @property
    def is_scored(self) -> bool:
        """True if sources of rewards score its samples."""
        return bool(self.config.rewards.names())

    @cached_property
    def params(self) -> SamplingParams:
        """Parameters of each request for its samples."""
        return sampling_params(self.config.generation)

    @cached_property
    def seed(self) -> int:
        """Seed of its samples; equal prompts of two named tasks get different samples."""
        seed = self.config.deepspeed.seed
        return sample_seed(seed, crc32(self.name.encode())) if self.name else seed

    @property
    def n_samples(self) -> int:
        """Samples of each group."""
        return self.config.ppo.n_samples_per_prompt

    @cached_property
    def estimator(self) -> Estimator:
        """Estimator of its advantages."""
        return estimator_of(self.config.advantage)

    @cached_property
    def reward_weights(self) -> Mapping[str, float]:
        """Weights of named rewards."""
        return self.config.rewards.weights()

    @property
    def most_in_vain(self) -> int:
        """Groups in a row, all of equal rewards, that end the run; 0 if such groups are trained on."""
        return self.config.ppo.dynamic_sampling * self.config.prompts_per_step

    @property
    def progress(self) -> TaskProgress:
        """Counters of the task when a run begins."""
        return TaskProgress(self.ratio, self.n_samples, self.max_concurrent)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of group ``index`` of the task, in ``--prompt_order``, pass after pass."""
        (row,) = next(cyclic_batches(len(self.prompts), 1, self._order, start=index))
        return self.prompts[row]

    def group(self, prompt: Prompt, index: int, number: int, attempts: int = 1) -> GroupInput:
        """Return the input of a group, with ``number`` in the run; seeds follow from its ``index`` in the task."""
        first = index * self.n_samples
        seeds = [sample_seed(self.seed, first + place) for place in range(self.n_samples)]
        return GroupInput(
            number=number,
            prompt=prompt,
            params=self.params,
            seeds=seeds,
            env_seed=sample_seed(self.seed, index) % 2**31,
            attempts=attempts,
            needs_greedy=self.estimator.needs_greedy,
        )

    def useful(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of groups from which something can be learned."""
        return useful_groups(samples, self.estimator.compares_steps, self.reward_weights)

    def player(self, parts: PlayerParts) -> Player:
        """Make the player of its samples; ``ValueError`` for options that the engine cannot follow."""
        has_rewards = self.is_scored or self.config.rewards.are_none
        with self.named():
            stop_ids = self.config.generation.stop_token_ids
            parts.driver.engine.sampled_ids.check_ends((), stop_ids)
        if self.players is None:
            return ResponsePlayer(parts.driver)
        return self.players.make(replace(parts, has_rewards=has_rewards))

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``ValueError`` for options that cannot work."""
        with self.named():
            if self.players is not None:
                self.players.check(tokenizer)

    def check_prompts(self) -> None:
        """Raise ``ValueError`` for prompts that cannot be played."""
        with self.named():
            if self.players is not None:
                self.players.check_prompts(self.prompts)

    def with_prompts(self, prompts: Sequence[Prompt], held_out: Sequence[Prompt] = ()) -> "Task":
        """Return a copy with these prompts, which then name the task."""
        return replace(
            self,
            prompts=[replace(prompt, task=self.name) for prompt in prompts],
            held_out=[replace(prompt, task=self.name) for prompt in held_out],
        )

    def label(self, flag: str) -> str:
        """Name of one of its data in records of a run."""
        return f"{flag} of task {self.name}" if self.name else flag

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the task in each ``ValueError``."""
        try:
            yield
        except ValueError as error:
            message = f"task {self.name}: {error}" if self.name else str(error)
            raise ValueError(message) from error

    @cached_property
    def _order(self) -> Order:
        return prompt_order(self.config.ppo.prompt_order, self.prompts, self.seed)


class TaskControl(Protocol):
    """Interface for watching and changing the tasks of a run, from any thread."""

    def progress(self) -> dict[str, dict[str, float]]:
        """Return the numbers of each task's progress."""

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Set the ratio or limit of a task; ``KeyError`` if no task has that name."""

    def register(self, fields: Mapping[str, Any]) -> None:
        """Add a task with the ``fields`` of a tasks file; ``ValueError`` names a wrong one."""


def refuse(tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]) -> Task:
    """Refuse a task that a program registers."""
    raise ValueError("this run takes no other tasks.")


def serve_nothing(control: TaskControl) -> Callable[[], None]:
    """Serve no tasks; there is nothing to end."""
    return lambda: None


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run.

    If ``mixed``, each has a share of the trained episodes, which ``ratios`` may change at each step. ``newcomer`` makes
    a task of the fields that a program registers; ``serve`` lets programs watch and change tasks, and returns the
    function that ends it.
    """

    tasks: Sequence[Task]
    mixed: bool = False
    ratios: Ratios | None = None
    newcomer: Callable[[PreTrainedTokenizerBase, Mapping[str, Any]], Task] = refuse
    serve: Callable[[TaskControl], Callable[[], None]] = serve_nothing

    @classmethod
    def of(cls, config: TrainPPOConfig, source: "Players | Tasks | None") -> "Tasks":
        """Return the tasks of ``source``, or the single task that it plays; ``config`` are the options of the run.

        Those of mixed tasks contain them already.
        """
        if not isinstance(source, Tasks):
            return cls([Task("", config, source)])
        if source.mixed:
            return source
        return replace(source, tasks=[replace(task, config=config) for task in source.tasks])

    @property
    def have_agents(self) -> bool:
        """True if agents play some of the samples, or those of a task that may join."""
        return self.mixed or any(task.players is not None for task in self.tasks)

    @property
    def give_rewards(self) -> bool | None:
        """True if no source of rewards is needed; None for a single task of single responses."""
        if self.mixed:  # each task is checked by itself
            return True
        (task,) = self.tasks
        return None if task.players is None else task.gives_rewards

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``ValueError`` for options of a task that cannot work."""
        for task in self.tasks:
            task.check(tokenizer)

    @property
    def scorer(self) -> Scorer | None:
        """Scorer of the samples of all tasks; None if nothing scores them."""
        scorers = {task.name: task.scorer for task in self.tasks}
        if not self.mixed:
            return self.tasks[0].scorer
        return TaskScorer(scorers) if any(scorers.values()) else None

    def players(self, parts: PlayerParts) -> dict[str, Player]:
        """Make the players of all tasks, by name."""
        return {task.name: task.player(parts) for task in self.tasks}
