"""Playing one group: the samples of a prompt, scored."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from openppo.config import TrainPPOConfig
from openppo.datasets.sampler import cyclic_batches
from openppo.experience.estimators import ESTIMATORS, Estimator
from openppo.experience.token_rewards import begin_scoring, useful_groups
from openppo.rewards import Scorer
from openppo.rollout.rollout import SampleFailed, SingleSampler, sample_seed, with_all_rewards
from openppo.rollout.sampling import sampling_params
from openppo.tracking import Metrics
from openppo.tracking.phase import current
from openppo.types import Prompt, SamplingParams, StopCheck, Trajectory

ATTEMPTS = 3
"""Of each sample; then its group goes on without it."""


@dataclass(frozen=True)
class GroupPlan:
    """How groups are sampled, the same on all ranks. Groups are numbered through the whole run, and so are prompts."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    n_samples: int
    seed: int
    estimator: Estimator
    weights: Mapping[str, float]
    only_useful: bool

    @classmethod
    def of(cls, config: TrainPPOConfig, prompts: Sequence[Prompt]) -> "GroupPlan":
        """The plan that options ask for."""
        ppo, estimator = config.ppo, ESTIMATORS[config.advantage.advantage_estimator]
        counts = ppo.n_samples_per_prompt, config.deepspeed.seed
        what = prompts, sampling_params(config.generation), *counts, estimator, config.rewards.weights()
        return cls(*what, ppo.dynamic_sampling)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a group, in the order of a synchronous run."""
        (index,) = next(cyclic_batches(len(self.prompts), 1, self.seed, start=number))
        return self.prompts[index]

    def sample_seed(self, number: int, sample: int, attempt: int) -> int:
        """The seed of a sample, at the first attempt that of a synchronous run."""
        seed = sample_seed(self.seed, number * self.n_samples + sample)
        return seed if attempt == 0 else sample_seed(seed, attempt)


@dataclass(frozen=True)
class Outcome:
    """How a group ended: with scored trajectories, with none that teach anything, or failed (None)."""

    number: int
    trajectories: list[Trajectory] | None
    metrics: Metrics
    error: str = ""


@dataclass(eq=False)
class GroupPlayer:
    """Plays groups as coroutines of the sampler's loop; ``scorer`` is None where trainers score."""

    plan: GroupPlan
    sampler: SingleSampler
    scorer: Scorer | None
    _unscored: list[tuple[list[Trajectory], Metrics, asyncio.Future[None]]] = field(default_factory=list)
    is_scoring: bool = False

    async def play(self, number: int) -> Outcome:
        """Sample a group, replace what fails, score it."""
        plan, metrics, errors = self.plan, Metrics(), list[str]()
        numbers = range(plan.n_samples)
        members = await asyncio.gather(*(self._member(number, i, plan.params, metrics, errors) for i in numbers))
        good = [parts for parts in members if parts is not None]
        if len(good) < min(2, plan.n_samples):
            return Outcome(number, None, metrics, errors[-1])
        trajectories = list(chain.from_iterable(good))
        if plan.estimator.needs_greedy:
            greedy = await self._member(number, 0, replace(plan.params, temperature=0.0), Metrics(), errors)
            if greedy is None:
                return Outcome(number, None, metrics, errors[-1])
            baseline = with_all_rewards(greedy)
            for trajectory in trajectories:
                trajectory.greedy = baseline
        await self._score(trajectories, metrics)
        if plan.only_useful:
            trajectories = useful_groups(trajectories, plan.estimator.compares_steps, plan.weights)
        return Outcome(number, trajectories, metrics)

    async def _member(
        self, number: int, sample: int, params: SamplingParams, metrics: Metrics, errors: list[str]
    ) -> list[Trajectory] | None:
        """The parts of one sample; None if all attempts failed."""
        plan = self.plan
        env_seed = sample_seed(plan.seed, number) % 2**31
        for attempt in range(ATTEMPTS):
            seed = plan.sample_seed(number, sample, attempt)
            try:
                return await self.sampler.sample_one(plan.prompt(number), params, seed, env_seed, number, metrics)
            except SampleFailed as error:
                errors.append(str(error))
        return None

    async def _score(self, trajectories: list[Trajectory], metrics: Metrics) -> None:
        """Score in the background; groups that wait meanwhile are scored together: sources run on one thread."""
        if self.scorer is None:
            return
        scored = asyncio.get_running_loop().create_future()
        self._unscored.append((trajectories, metrics, scored))
        while self._unscored and not self.is_scoring:
            self.is_scoring, batch, self._unscored = True, self._unscored, []
            try:
                rows = [trajectory for of_group, _, _ in batch for trajectory in of_group]
                rollout = begin_scoring(self.scorer, rows, self.plan.weights, StopCheck())
                await asyncio.to_thread(rollout.wait)
                current.progress()
            finally:
                self.is_scoring = False
            batch[0][1].merge(rollout.metrics)
            for *_, future in batch:
                future.set_result(None)
        await scored
