"""Prompts to scored trajectories, with the actor's weights of now: the synchronous ``RolloutSource``."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import PPODataConfig, TrainPPOConfig
from openppo.datasets import BatchSampler, load_prompts, shard
from openppo.datasets.sources import SourceRow
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.group_filters import useful_groups
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.rollout.failures import N_SHOWN, FailureCount, NothingTrainedError
from openppo.rollout.requests import free_memory
from openppo.rollout.rollout import (
    EngineSampler,
    Rollout,
    Sampler,
    SampleRequest,
    by_episode,
    episode_reward,
    rank_share,
    wait_for_scores,
)
from openppo.rollout.sampling import sampling_params
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.trainer.components import PPOComponents
from openppo.types import Comm, Prompt, Trajectory

_ALL_EQUAL = (
    "--dynamic_sampling: the rewards of each group are equal. Use other prompts, or a finer reward"
)


class PromptBatch(list[Prompt]):
    """Prompts of one step; ``number`` counts the batches of all episodes."""

    def __init__(self, prompts: Iterable[Prompt], number: int) -> None:
        super().__init__(prompts)
        self.number = number


class PromptSource:
    """Samples trajectories for batches of prompts and scores them in the background. Collective in every method."""

    def __init__(
        self, config: TrainPPOConfig, components: PPOComponents, sampler: Sampler | None = None
    ) -> None:
        assert components.engine is not None
        self.config = config
        self.components = components
        self.engine = components.engine
        self.sampled_by = sampler or EngineSampler(components.engine, components.strategy.comm)
        self.scorer = components.scorer
        self.timer = components.maker.hooks.timer
        self.comm = components.strategy.comm
        self.estimator = ESTIMATORS[config.advantage.advantage_estimator]
        self.sampler = BatchSampler(
            len(components.data.prompts), config.prompts_per_step, config.deepspeed.seed
        )
        self.reward_weights = config.rewards.weights()
        self.n_batches = config.ppo.num_episodes * len(self.sampler)
        self.has_no_end = (
            config.agents.environment is not None and not config.data.prompt_data
        )  # seeds of a game
        self.consumed_batches = 0  # of all episodes
        self.batch_under_way: PromptBatch | None = None  # of a loop over prompt_batches()
        self.consumed_prompts = 0  # sampled so far; groups and seeds follow from it
        self.failures = FailureCount()

    @property
    def steps(self) -> int:
        """Global steps, at most: a batch of prompts each, or several with dynamic sampling."""
        if self.has_no_end:
            return self.config.ppo.max_steps or 0
        return self.components.state.global_step + self.n_batches - self.consumed_batches

    @property
    def _planned_steps(self) -> int:
        """Global steps of a run that never stopped; without bound those of its options."""
        most = self.config.ppo.max_steps
        if self.has_no_end:
            return most or 0
        return self.n_batches if most is None else min(most, self.n_batches)

    def __iter__(self) -> Iterator[list[Trajectory]]:
        return map(self.rollout, self.prompt_batches())

    def prompt_batches(self) -> Iterator[PromptBatch]:
        """Pass over all prompts in every episode, in an order of its own. A batch counts when it is sampled from."""
        number = self.consumed_batches
        try:
            while number < self.n_batches or self.has_no_end:
                self.batch_under_way = self._batch(number)
                yield self.batch_under_way
                number = max(number + 1, self.consumed_batches)
        finally:
            self.batch_under_way = None

    def rollout(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        """Sample and score responses to this rank's share of ``prompts``; scores may still be under way.

        With ``--dynamic_sampling`` groups of equal rewards are dropped, and further prompts come from
        ``--prompt_data``. On all ranks ``Interrupted`` upon a signal, ``NothingTrainedError`` after many failures.
        """
        batch = prompts if isinstance(prompts, PromptBatch) else self.batch_under_way
        if batch is not None:
            self.consumed_batches = max(self.consumed_batches, batch.number + 1)
        with self.timer.step(self.components.state.global_step + 1):
            rollout = (
                self._filtered(prompts)
                if self.config.ppo.dynamic_sampling
                else self._sampled(prompts)
            )
        self.failures.end_step()
        if message := self.failures.steps_message(self._planned_steps):
            raise NothingTrainedError(message, rollout.failed)
        return rollout

    def publish(self, version: int) -> None:
        """Nothing to do: the engine reads the actor's weights in place when it samples."""

    def evaluate(self) -> list[Trajectory]:
        """Scored responses to ``--eval_data``: of the average with ``--enable_ema``, as it is what ``save`` writes."""
        if not self.components.data.held_out:
            return []
        options, seed = self.config.evaluation, self.config.deepspeed.seed
        sampling = (
            sampling_params(self.config.generation, options.eval_temperature),
            options.eval_n_samples_per_prompt,
        )
        with self.components.weights_to_save(), self.with_weights():
            held_out, metrics = self.components.data.held_out, Metrics()
            responses = self.sampled_by.sample(
                SampleRequest(held_out, *sampling, seed, 0, metrics, evaluation=True)
            )
        grading = self.components.grading
        for response in (
            responses if grading.scorer is not None else ()
        ):  # an agent may have given rewards
            response.scores = {}
            response.token_rewards = None
            response.step_ends = None
        rollout = begin_scoring(
            grading.scorer or self.scorer, responses, self.components.stop, prefix="eval_"
        )
        wait_for_scores(rollout, self.components.stop)
        check_rewarded(rollout, self.comm)
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """How many prompts are consumed, and by which free memory the engine was sized."""
        consumed = {
            "consumed_batches": self.consumed_batches,
            "consumed_prompts": self.consumed_prompts,
        }
        return (
            consumed if self.engine.free is None else consumed | {"free_memory": self.engine.free}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the next prompts."""
        self.consumed_batches, self.consumed_prompts = (
            state["consumed_batches"],
            state["consumed_prompts"],
        )
        self.engine.free = state.get("free_memory")

    def close(self) -> None:
        """End the sampler."""
        self.sampled_by.close()

    @contextmanager
    def with_weights(self) -> Iterator[None]:
        """Inside, the engine may decode, with the actor's weights of now."""
        self.engine.version = self.components.state.global_step
        with ExitStack() as stack:
            with timed("sync"):
                stack.enter_context(self.engine.with_weights(self.components.actor))
            if self.config.deepspeed.deterministic and self.engine.free is None:
                self.engine.free = self._free_memory()
            yield

    def _free_memory(self) -> int | None:
        """What is free on all ranks now, for this and all later rollouts: other rows would have other last bits."""
        everyones = self.comm.all_gather_object(free_memory(self.components.strategy.device))
        return min((free for free in everyones if free is not None), default=None)

    def _next_prompts(self) -> PromptBatch | None:
        """The next batch, which counts at once."""
        if self.consumed_batches >= self.n_batches and not self.has_no_end:
            return None
        self.consumed_batches += 1
        return self._batch(self.consumed_batches - 1)

    def _batch(self, number: int) -> PromptBatch:
        episode, start = divmod(number, len(self.sampler))
        rows = next(self.sampler.batches(episode, start))
        return PromptBatch((self.components.data.prompts[i] for i in rows), number)

    def _sampled(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Responses to this rank's share of ``prompts``, those of one prompt in a row, on which scoring has begun."""
        ready = [
            as_prompt(prompt, self.components.tokenizer, self.config.data) for prompt in prompts
        ]
        n_samples = self.config.ppo.n_samples_per_prompt
        seed, first = self.config.deepspeed.seed, self.consumed_prompts
        params = sampling_params(self.config.generation)
        metrics = Metrics()
        failed: list[Trajectory] = []
        with self.timer.phase("generation"), self.with_weights():
            asked = SampleRequest(
                ready,
                params,
                n_samples,
                seed=seed,
                first_group=first,
                metrics=metrics,
                note_failed=failed.append,
            )
            sampled = self.sampled_by.sample(asked)
            if self.estimator.needs_greedy:
                params = dataclasses.replace(params, temperature=0.0)
                greedy = self.sampled_by.sample(
                    asked._replace(params=params, n_samples=1, metrics=Metrics())
                )
                of_group = {parts[-1].group: tuple(parts) for parts in by_episode(greedy)}
                sampled = [trajectory for trajectory in sampled if trajectory.group in of_group]
                for trajectory in sampled:
                    trajectory.greedy = of_group[trajectory.group]
        self.timer.count_tokens("generation", sum(sum(t.action_mask) for t in sampled))
        self.consumed_prompts += len(ready)
        shown = self._count_groups(rank_share(ready, first, self.comm), sampled, failed)
        with self.timer.phase("scoring"):
            rollout = begin_scoring(self.scorer, sampled, self.components.stop)
        rollout.metrics.merge(metrics)
        rollout.failed.extend(shown)
        self.timer.count_tokens("scoring", sum(len(t.token_ids) for t in sampled))
        return rollout

    def _count_groups(
        self,
        share: tuple[Sequence[Prompt], int],
        sampled: Sequence[Trajectory],
        failed: Sequence[Trajectory],
    ) -> list[Trajectory]:
        """Count groups of all ranks that failed, in their order; returns a few of the ``failed`` episodes of all.

        ``share`` are this rank's prompts and the group of the first.
        """
        prompts, first = share
        good = {trajectory.group for trajectory in sampled}
        errors = {each.group: each.episode.failure for each in failed if each.episode is not None}
        outcomes: dict[int, str | None] = dict.fromkeys(good)
        for group in range(first, first + len(prompts)):
            if group not in good:
                outcomes[group] = errors.get(group, "its sampler returned no sample")

        of_ranks = self.comm.all_gather_object((outcomes, failed[:N_SHOWN]))
        shown = [each for _, of_rank in of_ranks for each in of_rank][:N_SHOWN]
        for outcomes, _ in of_ranks:
            for group in sorted(outcomes):
                self.failures.add_group(outcomes[group])
                if message := self.failures.groups_message():
                    raise NothingTrainedError(message, shown)
        return shown

    def _filtered(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Groups with different rewards, sampled until they fill a rollout batch or a bound is reached."""
        wanted, bound = self.config.prompts_per_step, self.config.ppo.dynamic_sampling_max_batches
        metrics = Metrics()
        everything: list[Trajectory] = []
        kept: list[Trajectory] = []
        failed: list[Trajectory] = []
        n_groups = n_batches = 0
        batch: Sequence[str | Prompt] | None = prompts
        while batch is not None:
            sampled = self._sampled(batch)
            n_batches += 1
            with self.timer.phase("scoring"):
                wait_for_scores(sampled, self.components.stop)
            everything += sampled
            metrics.merge(sampled.metrics)
            failed += sampled.failed
            for parts in by_episode(sampled):
                metrics.add("sampled_reward", episode_reward(parts, self.reward_weights))
            kept += useful_groups(sampled, self.estimator.compares_steps, self.reward_weights)
            n_groups = int(self.comm.all_reduce(torch.tensor(len({t.group for t in kept}))))
            batch = None if n_groups >= wanted or n_batches == bound else self._next_prompts()
        check_rewarded(everything, self.comm)
        if n_groups == 0:
            self.failures.drop_groups(_ALL_EQUAL)
        metrics.add("sampled_batches", n_batches, reduce="max")
        metrics.add("useful_groups", n_groups, reduce="max")
        return Rollout(first_groups(kept, wanted, self.comm), metrics, failed=failed[:N_SHOWN])


def first_groups(trajectories: Sequence[Trajectory], most: int, comm: Comm) -> list[Trajectory]:
    """This rank's part of the first groups of all ranks, dealt out as a rollout deals prompts. Collective."""
    everyones = [t for rank in comm.all_gather_object(list(trajectories)) for t in rank]
    groups = sorted({t.group for t in everyones})[:most]
    if not groups and comm.rank == 0:
        logger.warning("no prompt's responses got different rewards: nothing to train on")
    of_this_rank = set(shard(groups, comm.rank, comm.world_size))
    return sorted((t for t in everyones if t.group in of_this_rank), key=lambda t: t.group)


def as_prompt(
    prompt: str | Prompt, tokenizer: PreTrainedTokenizerBase, data: PPODataConfig
) -> Prompt:
    """A text as the prompt that the options make of it; ``ValueError`` if it is too long."""
    if isinstance(prompt, Prompt):
        return prompt
    options = dataclasses.replace(data, input_key="prompt", label_key=None)
    (made,) = load_prompts(
        [SourceRow({"prompt": prompt}, "", 1, flag="prompts")], tokenizer, options
    )
    return dataclasses.replace(made, row={})
