"""Synchronous ``RolloutSource``: scored samples of prompts, sampled with the actor's current weights."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.config import PPODataConfig, TrainPPOConfig
from openppo.datasets import BatchSampler, load_prompts, prompt_order, shard
from openppo.datasets.sources import SourceRow
from openppo.experience.hooks import Hooks
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.rollout.failures import N_SHOWN, FailureCount, NothingTrainedError
from openppo.rollout.rollout import Rollout, wait_for_scores
from openppo.sources.dynamic_sampling import UsefulSamples
from openppo.sources.groups import PlayedGroup
from openppo.sources.held_out import HeldOut
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.task import Task
from openppo.tracking import Metrics
from openppo.types import Prompt, RolloutSource, Sample, segments_of

_ALL_EQUAL = (
    "--dynamic_sampling: the rewards of each group are equal. Use other prompts, or a finer reward"
)


class PromptBatch(list[Prompt]):
    """Prompts of one step, with its ``number`` among the batches of all passes."""

    def __init__(self, prompts: Iterable[Prompt], number: int) -> None:
        super().__init__(prompts)
        self.number = number


class PromptSource:
    """Collective source that samples responses to batches of prompts and scores them in the background."""

    def __init__(
        self,
        config: TrainPPOConfig,
        task: Task,
        sampler: RankSampler,
        held_out: HeldOut,
        hooks: Hooks,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config = config
        self.task = task
        self.sampler = sampler
        self.held_out = held_out
        self.timer = hooks.timer
        self.stop = hooks.stop
        self.tokenizer = tokenizer
        self.comm = sampler.comm
        order = prompt_order(config.ppo.prompt_order, task.prompts, config.deepspeed.seed)
        self.batches = BatchSampler(len(task.prompts), config.prompts_per_step, order)
        self.n_batches = config.ppo.num_episodes * len(self.batches)
        # an environment has endless seeds
        self.is_endless = config.agents.environment is not None and not config.data.prompt_data
        self.consumed_batches = 0
        """Batches sampled from so far, in all passes over the prompts."""
        self.current_batch: PromptBatch | None = None
        """The current batch of a loop over ``prompt_batches()``."""
        self.consumed_prompts = 0
        """Prompts sampled from so far; group numbers and seeds derive from it."""
        self.failures = FailureCount()

    @property
    def steps(self) -> int:
        """Global steps of the whole run, if each further one takes a single batch of prompts."""
        if self.is_endless:
            return self.config.ppo.max_steps or 0
        return self.sampler.version() + self.n_batches - self.consumed_batches

    @property
    def _planned_steps(self) -> int:
        """Global steps planned at the start of the run; 0 if nothing bounds them."""
        max_steps = self.config.ppo.max_steps
        if self.is_endless:
            return max_steps or 0
        return self.n_batches if max_steps is None else min(max_steps, self.n_batches)

    def __iter__(self) -> Iterator[Rollout]:
        return map(self.rollout, self.prompt_batches())

    def prompt_batches(self) -> Iterator[PromptBatch]:
        """Yield the batches of ``--num_episodes`` passes over all prompts, in the order of ``--prompt_order``.

        A batch counts as consumed when it is sampled from.
        """
        number = self.consumed_batches
        try:
            while number < self.n_batches or self.is_endless:
                self.current_batch = self._batch(number)
                yield self.current_batch
                number = max(number + 1, self.consumed_batches)
        finally:
            self.current_batch = None

    def rollout(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Sample responses to this rank's share of ``prompts``, and start to score them.

        With ``--dynamic_sampling``, further prompts of ``--prompt_data`` replace groups with equal rewards. Raises, on
        all ranks, ``Interrupted`` on a signal and ``NothingTrainedError`` after many failures.
        """
        batch = prompts if isinstance(prompts, PromptBatch) else self.current_batch
        if batch is not None:
            self.consumed_batches = max(self.consumed_batches, batch.number + 1)

        play = self._play_useful if self.config.ppo.dynamic_sampling else self._play
        with self.timer.step(self.sampler.version() + 1):
            rollout = play(prompts)

        self.failures.end_step()
        message = self.failures.steps_message(self._planned_steps)
        if message:
            raise NothingTrainedError(message, rollout.failed)
        return rollout

    def publish(self, version: int) -> None:
        """Do nothing: the engine reads the actor's weights in place when it samples."""

    def evaluate(self) -> Sequence[Sample]:
        """Return scored samples of held-out prompts."""
        return self.held_out.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Return the consumed batches and prompts, and the free memory by which the engine was sized."""
        state = {
            "consumed_batches": self.consumed_batches,
            "consumed_prompts": self.consumed_prompts,
        }
        free = self.sampler.engine.free
        if free is not None:
            state["free_memory"] = free
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; sampling continues with the next prompts."""
        self.consumed_batches = state["consumed_batches"]
        self.consumed_prompts = state["consumed_prompts"]
        self.sampler.engine.fit_into(state.get("free_memory"))

    def close(self) -> None:
        """Close the sampler."""
        self.sampler.close()

    def _next_prompts(self) -> PromptBatch | None:
        """Return the next batch and count it as consumed; None if there is none."""
        if self.consumed_batches >= self.n_batches and not self.is_endless:
            return None
        self.consumed_batches += 1
        return self._batch(self.consumed_batches - 1)

    def _batch(self, number: int) -> PromptBatch:
        """Return batch ``number``, counted over all passes over the prompts."""
        prompt_epoch, start = divmod(number, len(self.batches))
        rows = next(self.batches.batches(prompt_epoch, start))
        return PromptBatch((self.task.prompts[row] for row in rows), number)

    def _play(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Play the groups of this rank's share of ``prompts``, and start to score their samples."""
        groups = []
        for number, prompt in enumerate(prompts, self.consumed_prompts):
            ready = as_prompt(prompt, self.tokenizer, self.config.data)
            groups.append(self.task.group(ready, index=number, number=number))

        metrics = Metrics()
        rank_groups = shard(groups, self.comm.rank, self.comm.world_size)
        with self.timer.phase("generation"), self.sampler.with_weights():
            played = self.sampler.play(rank_groups, metrics)
        samples = [sample for group in played for sample in group.samples]
        self.timer.count_tokens("generation", sum(sample.n_actions for sample in samples))
        self.consumed_prompts += len(groups)
        failed = self._count_groups(played)

        with self.timer.phase("scoring"):
            if self.config.rewards.are_none:
                rollout = Rollout(samples, Metrics())
            else:
                rollout = begin_scoring(self.task.scorer, samples, self.stop)
        rollout.metrics.merge(metrics)
        rollout.failed.extend(failed)
        n_tokens = sum(len(segment.token_ids) for segment in segments_of(samples))
        self.timer.count_tokens("scoring", n_tokens)
        return rollout

    def _count_groups(self, played: Sequence[PlayedGroup]) -> list[Sample]:
        """Count the failed groups of all ranks in order; return stand-ins for a few failed samples to show.

        ``NothingTrainedError`` after many failures.
        """
        errors = [group.error for group in played]
        failed = [sample for group in played for sample in group.failures][:N_SHOWN]
        by_rank = self.comm.all_gather_object((errors, failed))
        shown = list(chain.from_iterable(rank_failed for _, rank_failed in by_rank))[:N_SHOWN]

        for rank_errors, _ in by_rank:
            for error in rank_errors:
                self.failures.add_group(error)
                message = self.failures.groups_message()
                if message:
                    raise NothingTrainedError(message, shown)
        return shown

    def _play_useful(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Play until groups with unequal rewards fill a rollout batch, or the maximum of batches is reached."""
        useful = UsefulSamples(self.task, self.config.prompts_per_step, self.comm)
        batch: Sequence[str | Prompt] | None = prompts
        while batch is not None:
            rollout = self._play(batch)
            with self.timer.phase("scoring"):
                wait_for_scores(rollout, self.stop)
            for sample in rollout:
                reward = sample.total_reward(self.task.reward_weights)
                useful.metrics.add("sampled_reward", reward)
            useful.add(rollout)

            is_last = useful.n_batches == self.config.ppo.dynamic_sampling
            batch = None if useful.are_enough or is_last else self._next_prompts()

        check_rewarded(useful.all_samples, self.comm)
        if useful.n_groups == 0:
            self.failures.drop_groups(_ALL_EQUAL)
        useful.metrics.add("sampled_batches", useful.n_batches, reduce="max")
        useful.metrics.add("useful_groups", useful.n_groups, reduce="max")
        return useful.rollout(N_SHOWN)


def as_prompt(
    prompt: str | Prompt, tokenizer: PreTrainedTokenizerBase, data: PPODataConfig
) -> Prompt:
    """Make a prompt from a text, read as ``data`` says; ``ValueError`` if it is too long."""
    if isinstance(prompt, Prompt):
        return prompt
    options = dataclasses.replace(data, input_key="prompt", label_key=None)
    row = SourceRow({"prompt": prompt}, "", 1, flag="prompts")
    (loaded,) = load_prompts([row], tokenizer, options)
    return dataclasses.replace(loaded, row={})


def prompt_source(source: RolloutSource) -> PromptSource:
    """Return ``source`` if it takes prompts; ``TypeError`` otherwise."""
    if not isinstance(source, PromptSource):
        raise TypeError(
            f"{type(source).__name__} takes no prompts: iterate over trainer.source instead."
        )
    return source
