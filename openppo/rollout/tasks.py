"""Several tasks in one run: their options, their progress, and a sampler for all of them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.rollout.failures import FailureCount
from openppo.rollout.responses import ResponseSampler
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import Players, SamplerParts, SingleSampler
from openppo.rollout.sampling import sampling_params
from openppo.tracking import Metrics
from openppo.types import Prompt, Sample, SamplingParams


@dataclass(frozen=True)
class RunTask:
    """A task of a run.

    ``config`` are the run's options with the task's own, ``players`` make its sampler. ``ratio`` is its share of the
    trained episodes, ``max_concurrent`` bounds its running episodes on all ranks, and a failed episode is played again
    up to ``retries`` times. A run without tasks has one with an empty name. ``fields`` are those with which a program
    has registered it.
    """

    name: str
    config: TrainPPOConfig
    players: Players | None = None
    ratio: float = 1.0
    max_concurrent: int | None = None
    retries: int = 2
    fields: Mapping[str, Any] | None = None

    @property
    def has_rewards(self) -> bool:
        """True if sources of rewards score its episodes."""
        return bool(self.config.rewards.names())

    @property
    def progress(self) -> "TaskProgress":
        """Progress of the task when a run begins."""
        return TaskProgress(self.ratio, self.config.ppo.n_samples_per_prompt, self.max_concurrent)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``ValueError`` for prompts that cannot be played."""
        with self.named():
            if self.players is not None:
                self.players.check_prompts(prompts)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the task in each ``ValueError``."""
        try:
            yield
        except ValueError as error:
            message = f"task {self.name}: {error}" if self.name else str(error)
            raise ValueError(message) from error


@dataclass(eq=False)
class TaskProgress:
    """Progress of a task.

    ``ratio`` is its share of accepted episodes; the ratios of all tasks sum to 1. ``max_concurrent`` bounds its running
    episodes. ``begun``, ``running`` and ``failed`` count groups, ``failures`` those that failed in a row. ``accepted``
    counts episodes; ``counted`` is that count, less the episodes that its earlier ratios entitled it to. ``rewards``
    and ``seconds`` are sums over episodes that have ``ended``, also if they were too old to train on.
    """

    ratio: float
    group_size: int
    max_concurrent: int | None = None
    begun: int = 0
    running: int = 0
    failed: int = 0
    failures: FailureCount = field(default_factory=FailureCount)
    accepted: int = 0
    counted: float = 0
    ended: int = 0
    rewards: float = 0.0
    seconds: float = 0.0
    is_left_out: bool = False

    @property
    def mean_seconds(self) -> float | None:
        """Mean duration of a group; None before the first has ended."""
        return self.seconds / self.ended if self.ended else None

    def progress(self, total: int) -> dict[str, float]:
        """Return the ratio, the share reached of ``total`` accepted episodes, and further numbers."""
        return {
            "ratio": self.ratio,
            "share": self.accepted / max(1, total),
            "accepted_episodes": self.accepted,
            "running_groups": self.running,
            "failed_groups": self.failed,
            "group_s": self.mean_seconds or 0.0,
        }

    @property
    def has_room(self) -> bool:
        """True if another group may begin."""
        if self.ratio <= 0 or self.is_left_out:
            return False
        if self.max_concurrent is None:
            return True
        n_episodes = (self.running + 1) * self.group_size
        return n_episodes <= max(self.max_concurrent, self.group_size)


Ratios = Callable[[Mapping[str, TaskProgress]], Mapping[str, float]]
"""Function of the tasks that are played to their new ratios, in any unit, called once per step."""


def by_success(tasks: Mapping[str, TaskProgress]) -> dict[str, float]:
    """Prefer tasks with little reward.

    The ratio is 1 less the mean reward, of rewards from 0 to 1, and at least 0.1.
    """
    ratios: dict[str, float] = {}
    for name, task in tasks.items():
        mean_reward = task.rewards / max(1, task.ended)
        ratios[name] = max(0.1, 1 - mean_reward)
    return ratios


def by_speed(tasks: Mapping[str, TaskProgress]) -> dict[str, float]:
    """Prefer fast tasks: the ratio is episodes per second, their mean before the first has ended."""
    known = [task.mean_seconds for task in tasks.values() if task.mean_seconds is not None]
    usual = sum(known) / len(known) if known else 1.0
    return {name: 1 / max(1e-3, task.mean_seconds or usual) for name, task in tasks.items()}


RATIOS: dict[str, Ratios] = {"success": by_success, "speed": by_speed}
"""Values of ``--task_ratios`` besides functions of the user."""

Newcomer = Callable[[Mapping[str, Any]], tuple[RunTask, list[Prompt]]]
"""Function of the fields that a program registers to a task and its prompts."""


def no_newcomer(fields: Mapping[str, Any]) -> tuple[RunTask, list[Prompt]]:
    """Refuse a task that a program registers."""
    raise ValueError("this run takes no other tasks.")


class TaskControl(Protocol):
    """Interface for watching and changing the tasks of a run, from any thread."""

    def progress(self) -> dict[str, dict[str, float]]:
        """Return the numbers of each task's progress."""

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Set the ratio or limit of a task; ``KeyError`` if no task has that name."""

    def join(self, fields: dict[str, Any]) -> None:
        """Add a task with the ``fields`` of a ``TaskService``; ``ValueError`` names a wrong field."""


class TaskPlayers(Players):
    """Factory of the sampler of several tasks; ``ratios`` may set their ratios at each step."""

    gives_rewards = True
    newcomer: Newcomer = staticmethod(no_newcomer)

    def __init__(self, tasks: Sequence[RunTask], ratios: Ratios | None = None) -> None:
        self.tasks = tasks
        self.ratios = ratios

    @classmethod
    def of(cls, config: TrainPPOConfig, players: Players | None) -> "TaskPlayers":
        """Return ``players`` if they are ``TaskPlayers``, or make those of a single task."""
        if isinstance(players, cls):
            return players
        return cls([RunTask("", config, players)])

    @property
    def are_named(self) -> bool:
        """True if the run has named tasks, not only the single one without a name."""
        return bool(self.tasks[0].name)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``ValueError``, with the task's name, for options that cannot work."""
        for task in self.tasks:
            with task.named():
                if task.players is not None:
                    task.players.check(tokenizer)

    def serve(self, control: TaskControl) -> Callable[[], None]:
        """Publish ``control``, on the trainers' first rank; return the function that ends it."""
        return lambda: None

    def make(self, parts: SamplerParts) -> "TaskSampler":
        """Make the sampler of all tasks, with one driver."""
        return TaskSampler(self.tasks, replace(parts, driver=parts.own_driver()))


class TaskSampler:
    """Sampler that passes each prompt to the sampler of its task. All share a driver."""

    def __init__(self, tasks: Sequence[RunTask], parts: SamplerParts) -> None:
        self.parts = parts
        self.driver = parts.own_driver()
        self.params = {task.name: sampling_params(task.config.generation) for task in tasks}
        self.samplers = {task.name: self._new_sampler(task) for task in tasks}

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Sample this rank's share, one task after the other, at the temperature of the request."""
        samples: list[Sample] = []
        first_group = request.first_group
        for name, sampler in list(self.samplers.items()):
            prompts = [prompt for prompt in request.prompts if prompt.task == name]
            if not prompts:
                continue

            params = replace(self.params[name], temperature=request.params.temperature)
            samples += sampler.sample(
                request._replace(prompts=prompts, params=params, first_group=first_group)
            )
            first_group += len(prompts)
        return samples

    async def start(self) -> None:
        """Start all samplers."""
        for sampler in self.samplers.values():
            await sampler.start()

    async def join(self, task: RunTask) -> None:
        """Add a task, which is not evaluated."""
        self.params[task.name] = sampling_params(task.config.generation)
        sampler = self._new_sampler(task)
        self.samplers[task.name] = sampler
        await sampler.start()

    async def end(self) -> None:
        """End all samplers."""
        for sampler in self.samplers.values():
            await sampler.end()

    async def sample_one(
        self,
        prompt: Prompt,
        params: SamplingParams,
        seed: int,
        env_seed: int,
        group: int,
        metrics: Metrics,
    ) -> Sample:
        """Return one sample."""
        return await self.samplers[prompt.task].sample_one(
            prompt, params, seed, env_seed=env_seed, group=group, metrics=metrics
        )

    def _new_sampler(self, task: RunTask) -> SingleSampler:
        needs_none = task.has_rewards or task.config.rewards.are_none
        parts = replace(self.parts, has_rewards=needs_none)
        with task.named():
            parts.engine.sampled_ids.check_ends((), task.config.generation.stop_token_ids)
        return ResponseSampler(parts) if task.players is None else task.players.make(parts)

    def close(self) -> None:
        """End all samplers and the driver."""
        asyncio.run_coroutine_threadsafe(self.end(), self.driver.loop).result()
        self.driver.close()
