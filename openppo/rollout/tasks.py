"""Several tasks in one run: what each is, its part of the run, and one sampler for all of them."""

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
from openppo.types import Prompt, SamplingParams, Trajectory


@dataclass(frozen=True)
class RunTask:
    """A task of a run: ``config`` are the run's options with the task's own, ``players`` plays its episodes.

    ``ratio`` is its share of the trained episodes, ``max_concurrent`` bounds its episodes under way on all ranks, and a
    failed episode is played again ``retries`` times. A run without tasks is one without a name. ``fields`` are what a
    program has registered it with.
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
        """Whether sources of rewards score its episodes."""
        return bool(self.config.rewards.names())

    @property
    def share(self) -> "TaskProgress":
        """Its part of a run that begins."""
        return TaskProgress(self.ratio, self.config.ppo.n_samples_per_prompt, self.max_concurrent)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """``ValueError`` for prompts that cannot be played."""
        with self.named():
            if self.players is not None:
                self.players.check_prompts(prompts)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the task in each ``ValueError``."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"task {self.name}: {error}" if self.name else str(error)) from error


@dataclass(eq=False)
class TaskProgress:
    """A task's part of a run. ``ratio`` is its share of accepted episodes; the ratios of all tasks sum to 1.

    ``max_concurrent`` bounds its episodes under way. Groups ``begun``, ``running`` and ``failed``, with
    ``failures`` in a row; ``accepted`` episodes; ``counted`` are the same, less what its ratios so far would have given
    it. ``rewards`` and ``seconds`` are sums over those that have ``ended``, also if they were too old.
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
        """What a group takes; None while none has ended."""
        return self.seconds / self.ended if self.ended else None

    def progress(self, total: int) -> dict[str, float]:
        """The ratio wanted, the share reached of ``total`` accepted episodes, and other counts."""
        counts = {
            "accepted_episodes": self.accepted,
            "running_groups": self.running,
            "failed_groups": self.failed,
        }
        reached = {"ratio": self.ratio, "share": self.accepted / max(1, total)}
        return {**reached, **counts, "group_s": self.mean_seconds or 0.0}

    @property
    def has_room(self) -> bool:
        """Whether another group may begin."""
        most = self.max_concurrent
        fits = most is None or (self.running + 1) * self.group_size <= max(most, self.group_size)
        return fits and self.ratio > 0 and not self.is_left_out


Ratios = Callable[[Mapping[str, TaskProgress]], Mapping[str, float]]
"""New ratios, in any unit, of the tasks that are played; called once per global step."""


def by_success(shares: Mapping[str, TaskProgress]) -> dict[str, float]:
    """More of what succeeds less: 1 less the mean reward, of a reward from 0 to 1, and 0.1 at least."""
    return {
        name: max(0.1, 1 - share.rewards / max(1, share.ended)) for name, share in shares.items()
    }


def by_speed(shares: Mapping[str, TaskProgress]) -> dict[str, float]:
    """More of what takes less time: episodes per second; before the first has ended all are alike."""
    known = [share.mean_seconds for share in shares.values() if share.mean_seconds is not None]
    usual = sum(known) / len(known) if known else 1.0
    return {name: 1 / max(1e-3, share.mean_seconds or usual) for name, share in shares.items()}


RATIOS: dict[str, Ratios] = {"success": by_success, "speed": by_speed}
"""Values of ``--task_ratios`` besides a function of one's own."""


Newcomer = Callable[[Mapping[str, Any]], tuple[RunTask, list[Prompt]]]
"""Makes a task and its prompts of the fields that a program registers; ``ValueError`` says what is wrong."""


def no_newcomer(fields: Mapping[str, Any]) -> tuple[RunTask, list[Prompt]]:
    """Refuse."""
    raise ValueError("this run takes no other tasks.")


class TaskControl(Protocol):
    """What can be asked of the tasks of a run, and changed, on any thread."""

    def progress(self) -> dict[str, dict[str, float]]:
        """What each task has come to."""

    def change(self, name: str, ratio: float | None, max_concurrent: int | None) -> None:
        """Another ratio or limit of a task; ``KeyError`` if there is none of that name."""

    def join(self, fields: dict[str, Any]) -> None:
        """Another task of the ``fields`` of a ``TaskService``; ``ValueError`` says what is wrong."""


class TaskPlayers(Players):
    """Makes a sampler of several tasks; ``ratios``, if given, sets theirs anew at each step."""

    gives_rewards = True
    newcomer: Newcomer = staticmethod(no_newcomer)

    def __init__(self, tasks: Sequence[RunTask], ratios: Ratios | None = None) -> None:
        self.tasks, self.ratios = tasks, ratios

    @classmethod
    def of(cls, config: TrainPPOConfig, players: Players | None) -> "TaskPlayers":
        """``players`` if it makes tasks, else one that plays it as the only one."""
        return players if isinstance(players, cls) else cls([RunTask("", config, players)])

    @property
    def are_named(self) -> bool:
        """Whether the run has tasks with names, not only itself."""
        return bool(self.tasks[0].name)

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """``ValueError`` naming the task of what cannot work."""
        for task in self.tasks:
            with task.named():
                if task.players is not None:
                    task.players.check(tokenizer)

    def serve(self, control: TaskControl) -> Callable[[], None]:
        """Let others ask and change, on the trainers' first rank; what is returned ends it."""
        return lambda: None

    def make(self, parts: SamplerParts) -> "TaskSampler":
        """The sampler."""
        return TaskSampler(self.tasks, replace(parts, driver=parts.own_driver()))


class TaskSampler:
    """Each prompt is sampled by the sampler of its task. All share a driver."""

    def __init__(self, tasks: Sequence[RunTask], parts: SamplerParts) -> None:
        self.parts, self.driver = parts, parts.own_driver()
        self.params = {task.name: sampling_params(task.config.generation) for task in tasks}
        self.samplers = {task.name: self._made(task) for task in tasks}

    def sample(self, asked: SampleRequest) -> list[Trajectory]:
        """This rank's share, one task after the other, at the temperature of the request."""
        sampled, first_group = list[Trajectory](), asked.first_group
        for name, sampler in list(self.samplers.items()):
            if mine := [prompt for prompt in asked.prompts if prompt.task == name]:
                own = replace(self.params[name], temperature=asked.params.temperature)
                sampled += sampler.sample(
                    asked._replace(prompts=mine, params=own, first_group=first_group)
                )
            first_group += len(mine)
        return sampled

    async def start(self) -> None:
        """Start all."""
        for sampler in self.samplers.values():
            await sampler.start()

    async def join(self, task: RunTask) -> None:
        """Another task, from now on; it is not evaluated."""
        self.params[task.name] = sampling_params(task.config.generation)
        self.samplers[task.name] = sampler = self._made(task)
        await sampler.start()

    async def end(self) -> None:
        """End all."""
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
    ) -> list[Trajectory]:
        """The parts of one sample."""
        return await self.samplers[prompt.task].sample_one(
            prompt, params, seed, env_seed=env_seed, group=group, metrics=metrics
        )

    def _made(self, task: RunTask) -> SingleSampler:
        own = replace(self.parts, has_rewards=task.has_rewards)
        with task.named():
            own.engine.sampled_ids.check_ends((), task.config.generation.stop_token_ids)
        return ResponseSampler(own) if task.players is None else task.players.make(own)

    def close(self) -> None:
        """End all, and the driver."""
        asyncio.run_coroutine_threadsafe(self.end(), self.driver.loop).result()
        self.driver.close()
