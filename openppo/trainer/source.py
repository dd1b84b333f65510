"""Synchronous ``RolloutSource``: scored responses to prompts, sampled with the actor's current weights."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import PPODataConfig, TrainPPOConfig
from openppo.datasets import BatchSampler, load_prompts, prompt_order, shard
from openppo.datasets.sources import SourceRow
from openppo.experience.group_filters import useful_groups
from openppo.experience.own_estimator import estimator_of
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.rollout.engine_sampler import EngineSampler, rank_share
from openppo.rollout.failures import N_SHOWN, FailureCount, NothingTrainedError
from openppo.rollout.memory import free_memory
from openppo.rollout.rollout import Rollout, wait_for_scores
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import Sampler
from openppo.rollout.sampling import sampling_params
from openppo.tracking import Metrics
from openppo.tracking.phase import timed
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation.held_out import measure_held_out_kl, scored_held_out
from openppo.types import Comm, Prompt, Sample, segments_of

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
        self.estimator = estimator_of(config.advantage)
        prompts = components.data.prompts
        order = prompt_order(config.ppo.prompt_order, prompts, config.deepspeed.seed)
        self.sampler = BatchSampler(len(prompts), config.prompts_per_step, order)
        self.reward_weights = config.rewards.weights()
        self.n_batches = config.ppo.num_episodes * len(self.sampler)
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
        return self.components.state.global_step + self.n_batches - self.consumed_batches

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

        sample = self._sample_filtered if self.config.ppo.dynamic_sampling else self._sample
        with self.timer.step(self.components.state.global_step + 1):
            rollout = sample(prompts)

        self.failures.end_step()
        message = self.failures.steps_message(self._planned_steps)
        if message:
            raise NothingTrainedError(message, rollout.failed)
        return rollout

    def publish(self, version: int) -> None:
        """Do nothing: the engine reads the actor's weights in place when it samples."""

    def evaluate(self) -> Sequence[Sample]:
        """Return scored responses to ``--eval_data``, sampled with the weights that ``save`` writes."""
        held_out = self.components.data.held_out
        if not held_out:
            return []

        options = self.config.evaluation
        request = SampleRequest(
            held_out,
            sampling_params(self.config.generation, options.eval_temperature),
            options.eval_n_samples_per_prompt,
            seed=self.config.deepspeed.seed,
            first_group=0,
            metrics=Metrics(),
            evaluation=True,
        )
        with self.components.weights_to_save(), self.with_weights():
            responses = self.sampled_by.sample(request)

        rollout = scored_held_out(self.components, responses, self.scorer)
        if self.config.measures_held_out_kl:
            with self.components.weights_to_save():
                measure_held_out_kl(self.components.maker, responses, rollout.metrics)
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return the consumed batches and prompts, and the free memory by which the engine was sized."""
        state = {
            "consumed_batches": self.consumed_batches,
            "consumed_prompts": self.consumed_prompts,
        }
        if self.engine.free is not None:
            state["free_memory"] = self.engine.free
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; sampling continues with the next prompts."""
        self.consumed_batches = state["consumed_batches"]
        self.consumed_prompts = state["consumed_prompts"]
        self.engine.free = state.get("free_memory")

    def close(self) -> None:
        """Close the sampler."""
        self.sampled_by.close()

    @contextmanager
    def with_weights(self) -> Iterator[None]:
        """Let the engine decode with the actor's current weights inside the ``with`` block."""
        self.engine.version = self.components.state.global_step
        with ExitStack() as stack:
            with timed("sync"):
                stack.enter_context(self.engine.with_weights(self.components.actor))
            if self.config.deepspeed.deterministic and self.engine.free is None:
                self.engine.free = _least_free_memory(self.comm, self.components.strategy.device)
            yield

    def _next_prompts(self) -> PromptBatch | None:
        """Return the next batch and count it as consumed; None if there is none."""
        if self.consumed_batches >= self.n_batches and not self.is_endless:
            return None
        self.consumed_batches += 1
        return self._batch(self.consumed_batches - 1)

    def _batch(self, number: int) -> PromptBatch:
        """Return batch ``number``, counted over all passes over the prompts."""
        prompt_epoch, start = divmod(number, len(self.sampler))
        rows = next(self.sampler.batches(prompt_epoch, start))
        return PromptBatch((self.components.data.prompts[i] for i in rows), number)

    def _sample(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Sample responses to this rank's share of ``prompts``, and start to score them.

        Responses to one prompt are adjacent.
        """
        tokenizer = self.components.tokenizer
        ready = [as_prompt(prompt, tokenizer, self.config.data) for prompt in prompts]
        first_group = self.consumed_prompts
        metrics = Metrics()
        failed: list[Sample] = []
        request = SampleRequest(
            ready,
            sampling_params(self.config.generation),
            self.config.ppo.n_samples_per_prompt,
            seed=self.config.deepspeed.seed,
            first_group=first_group,
            metrics=metrics,
            note_failed=failed.append,
        )
        with self.timer.phase("generation"), self.with_weights():
            sampled = self.sampled_by.sample(request)
            if self.estimator.needs_greedy:
                sampled = _with_greedy(self.sampled_by, sampled, request)
        self.timer.count_tokens("generation", sum(sample.n_actions for sample in sampled))
        self.consumed_prompts += len(ready)
        shown = self._count_groups(rank_share(ready, first_group, self.comm), sampled, failed)

        with self.timer.phase("scoring"):
            if self.config.rewards.are_none:
                rollout = Rollout(sampled, Metrics())
            else:
                rollout = begin_scoring(self.scorer, sampled, self.components.stop)
        rollout.metrics.merge(metrics)
        rollout.failed.extend(shown)
        n_tokens = sum(len(segment.token_ids) for segment in segments_of(sampled))
        self.timer.count_tokens("scoring", n_tokens)
        return rollout

    def _count_groups(
        self,
        share: tuple[Sequence[Prompt], int],
        sampled: Sequence[Sample],
        failed: Sequence[Sample],
    ) -> list[Sample]:
        """Count the failed groups of all ranks in order, and return a few ``failed`` episodes to show.

        ``share`` is this rank's prompts and the group of the first. ``NothingTrainedError`` after many failures.
        """
        outcomes = _outcomes(share, sampled, failed)
        outcomes_by_rank = self.comm.all_gather_object((outcomes, failed[:N_SHOWN]))
        episodes = chain.from_iterable(few_failed for _, few_failed in outcomes_by_rank)
        shown = list(episodes)[:N_SHOWN]

        for outcomes, _ in outcomes_by_rank:
            for group in sorted(outcomes):
                self.failures.add_group(outcomes[group])
                message = self.failures.groups_message()
                if message:
                    raise NothingTrainedError(message, shown)
        return shown

    def _sample_filtered(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Sample until groups with unequal rewards fill a rollout batch, or the maximum of batches is reached."""
        wanted = self.config.prompts_per_step
        max_batches = self.config.ppo.dynamic_sampling_max_batches
        metrics = Metrics()
        all_sampled: list[Sample] = []
        kept: list[Sample] = []
        failed: list[Sample] = []
        n_groups = 0
        n_batches = 0
        batch: Sequence[str | Prompt] | None = prompts
        while batch is not None:
            sampled = self._sample(batch)
            n_batches += 1
            with self.timer.phase("scoring"):
                wait_for_scores(sampled, self.components.stop)
            all_sampled += sampled
            metrics.merge(sampled.metrics)
            failed += sampled.failed
            for each in sampled:
                metrics.add("sampled_reward", each.total_reward(self.reward_weights))

            kept += useful_groups(sampled, self.estimator.compares_steps, self.reward_weights)
            groups = {each.group for each in kept}
            n_groups = int(self.comm.all_reduce(torch.tensor(len(groups))))
            is_done = n_groups >= wanted or n_batches == max_batches
            batch = None if is_done else self._next_prompts()

        check_rewarded(all_sampled, self.comm)
        if n_groups == 0:
            self.failures.drop_groups(_ALL_EQUAL)
        metrics.add("sampled_batches", n_batches, reduce="max")
        metrics.add("useful_groups", n_groups, reduce="max")
        return Rollout(first_groups(kept, wanted, self.comm), metrics, failed=failed[:N_SHOWN])


def _with_greedy(
    sampler: Sampler, sampled: Sequence[Sample], request: SampleRequest
) -> list[Sample]:
    """Add a greedy response to each group, as its baseline; drop groups without one."""
    params = dataclasses.replace(request.params, temperature=0.0)
    greedy = sampler.sample(request._replace(params=params, n_samples=1, metrics=Metrics()))
    by_group = {sample.group: sample for sample in greedy}
    return [
        dataclasses.replace(sample, greedy=by_group[sample.group])
        for sample in sampled
        if sample.group in by_group
    ]


def _outcomes(
    share: tuple[Sequence[Prompt], int],
    sampled: Sequence[Sample],
    failed: Sequence[Sample],
) -> dict[int, str | None]:
    """Return the failure of each of this rank's groups; None for a group with samples."""
    prompts, first = share
    sampled_groups = {sample.group for sample in sampled}
    errors = {
        sample.group: sample.episode.failure for sample in failed if sample.episode is not None
    }
    outcomes: dict[int, str | None] = dict.fromkeys(sampled_groups)
    for group in range(first, first + len(prompts)):
        if group not in sampled_groups:
            outcomes[group] = errors.get(group, "its sampler returned no sample")
    return outcomes


def _least_free_memory(comm: Comm, device: torch.device) -> int | None:
    """Return the smallest number of free bytes of any rank; None without GPUs.

    Later rollouts reuse it: another number of rows would change the last bits of log-probs.
    """
    free_by_rank = comm.all_gather_object(free_memory(device))
    return min((free for free in free_by_rank if free is not None), default=None)


def first_groups(samples: Sequence[Sample], limit: int, comm: Comm) -> list[Sample]:
    """Return this rank's share of the first ``limit`` groups of all ranks, dealt like prompts. Collective."""
    gathered = list(chain.from_iterable(comm.all_gather_object(list(samples))))
    groups = sorted({sample.group for sample in gathered})[:limit]
    if not groups and comm.rank == 0:
        logger.warning("no prompt's responses got different rewards: nothing to train on")
    rank_groups = set(shard(groups, comm.rank, comm.world_size))
    dealt = [sample for sample in gathered if sample.group in rank_groups]
    return sorted(dealt, key=lambda sample: sample.group)


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
