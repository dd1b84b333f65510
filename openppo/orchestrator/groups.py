"""The player of groups: samples of a prompt, scored."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from openppo.datasets.orders import prompt_order
from openppo.datasets.sampler import Order, cyclic_batches
from openppo.experience.estimators import Estimator
from openppo.experience.group_filters import useful_groups
from openppo.experience.own_estimator import estimator_of
from openppo.experience.scoring import begin_scoring
from openppo.orchestrator.schedule import Start
from openppo.rewards import Scorer
from openppo.rollout.failures import N_SHOWN
from openppo.rollout.samplers import SampleFailed
from openppo.rollout.sampling import sampling_params
from openppo.rollout.seeds import sample_seed
from openppo.rollout.tasks import RunTask, TaskSampler
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Prompt, Sample, SamplingParams, StopCheck

ATTEMPTS = 3
"""Attempts at each sample, unless its task sets ``retries``; then its group continues without it."""


@dataclass(frozen=True)
class GroupPlan:
    """Plan of the groups of a task, the same on all ranks.

    Prompts come in ``prompt_order``, the option. ``index`` is a group's place among them. With ``most_in_vain`` above 0
    groups of equal rewards are left out; as many in a row end the run.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    n_samples: int
    seed: int
    estimator: Estimator
    weights: Mapping[str, float]
    most_in_vain: int
    attempts: int = ATTEMPTS
    prompt_order: str = "shuffled"

    @classmethod
    def of(cls, task: RunTask, prompts: Sequence[Prompt]) -> "GroupPlan":
        """Make the plan of a task from its options."""
        config = task.config
        ppo = config.ppo
        # Equal prompts of two tasks get different samples; a run without tasks those of a synchronous one.
        seed = config.deepspeed.seed
        if task.name:
            seed = sample_seed(seed, crc32(task.name.encode()))
        most_batches = ppo.dynamic_sampling_max_batches if ppo.dynamic_sampling else 0
        return cls(
            prompts=prompts,
            params=sampling_params(config.generation),
            n_samples=ppo.n_samples_per_prompt,
            seed=seed,
            estimator=estimator_of(config.advantage),
            weights=config.rewards.weights(),
            most_in_vain=most_batches * config.prompts_per_step,
            attempts=1 + task.retries,
            prompt_order=ppo.prompt_order,
        )

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a group, in the order of a synchronous run."""
        (row,) = next(cyclic_batches(len(self.prompts), 1, self._order, start=index))
        return self.prompts[row]

    @cached_property
    def _order(self) -> Order:
        return prompt_order(self.prompt_order, self.prompts, self.seed)

    def sample_seed(self, index: int, sample: int, attempt: int) -> int:
        """Return the seed of a sample; at the first attempt, that of a synchronous run."""
        seed = sample_seed(self.seed, index * self.n_samples + sample)
        return seed if attempt == 0 else sample_seed(seed, attempt)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a group after ``seconds``.

    ``samples`` are scored; without any the group teaches nothing, and None stands for a failed group. ``failed``
    are stand-ins for some of its failed attempts.
    """

    number: int
    samples: list[Sample] | None
    metrics: Metrics
    error: str = ""
    failed: Sequence[Sample] = ()
    seconds: float = 0.0


class _Unscored(NamedTuple):
    """A group that waits for its scores."""

    samples: list[Sample]
    metrics: Metrics
    scored: asyncio.Future[list[Sample]]


@dataclass(eq=False)
class GroupPlayer:
    """Player of groups, by the plan of their task, as coroutines of the sampler's loop.

    ``scorer`` is None if trainers score.
    """

    plans: dict[str, GroupPlan]
    sampler: TaskSampler
    scorer: Scorer | None
    _unscored: list[_Unscored] = field(default_factory=list)
    is_scoring: bool = False

    async def play(self, start: Start) -> Outcome:
        """Sample a group, replace failed samples, and score it."""
        begun = time.monotonic()
        failures: list[SampleFailed] = []
        outcome = await self._play(start, failures)
        failed = [error.sample for error in failures if error.sample is not None]
        return replace(outcome, failed=failed[:N_SHOWN], seconds=time.monotonic() - begun)

    async def join(self, task: RunTask, prompts: Sequence[Prompt]) -> None:
        """Add a task."""
        self.plans[task.name] = GroupPlan.of(task, prompts)
        await self.sampler.join(task)

    async def _play(self, start: Start, failures: list[SampleFailed]) -> Outcome:
        plan = self.plans[start.task]
        number = start.number
        metrics = Metrics()
        work = [
            self._member(plan, start, place, params=plan.params, metrics=metrics, failures=failures)
            for place in range(plan.n_samples)
        ]
        members = await asyncio.gather(*work)
        samples = [sample for sample in members if sample is not None]
        if len(samples) < min(2, plan.n_samples):
            return Outcome(number, None, metrics, error=str(failures[-1]))

        if plan.estimator.needs_greedy:
            params = replace(plan.params, temperature=0.0)
            greedy = await self._member(
                plan, start, 0, params=params, metrics=Metrics(), failures=failures
            )
            if greedy is None:
                return Outcome(number, None, metrics, error=str(failures[-1]))
            samples = [replace(sample, greedy=greedy) for sample in samples]

        samples = await self._scored(samples, metrics)
        if plan.most_in_vain > 0:
            errors = [sample.reward_error for sample in samples if sample.reward_error is not None]
            if len(errors) == len(samples):
                return Outcome(number, None, metrics, error=errors[0])
            samples = useful_groups(samples, plan.estimator.compares_steps, plan.weights)
        return Outcome(number, samples, metrics)

    async def _member(
        self,
        plan: GroupPlan,
        start: Start,
        place: int,
        params: SamplingParams,
        metrics: Metrics,
        failures: list[SampleFailed],
    ) -> Sample | None:
        """Return the sample at ``place`` of its group; None if all attempts failed."""
        prompt = plan.prompt(start.index)
        env_seed = sample_seed(plan.seed, start.index) % 2**31
        for attempt in range(plan.attempts):
            seed = plan.sample_seed(start.index, place, attempt)
            try:
                return await self.sampler.sample_one(
                    prompt, params, seed, env_seed=env_seed, group=start.number, metrics=metrics
                )
            except SampleFailed as error:
                failures.append(error)
        return None

    async def _scored(self, samples: list[Sample], metrics: Metrics) -> list[Sample]:
        """Score in the background; groups that wait meanwhile are scored together."""
        if self.scorer is None:
            return samples

        scored = asyncio.get_running_loop().create_future()
        self._unscored.append(_Unscored(samples, metrics, scored))
        while self._unscored and not self.is_scoring:
            self.is_scoring = True
            groups = self._unscored
            self._unscored = []
            try:
                together = [sample for group in groups for sample in group.samples]
                rollout = begin_scoring(self.scorer, together, StopCheck())
                await asyncio.to_thread(rollout.wait)
                current.progress()
            finally:
                self.is_scoring = False
            groups[0].metrics.merge(rollout.metrics)
            remaining = iter(rollout)
            for group in groups:
                group.scored.set_result(list(islice(remaining, len(group.samples))))
        return await scored
