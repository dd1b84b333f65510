"""The story of PPO: sample, make experience, train, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets import BatchSampler, TokenExample, cyclic_batches, render_prompt
from openppo.datasets.templates import as_messages
from openppo.experience.maker import ExperienceMaker
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.loading import pad_token_id
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.rewards import Scorer
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.engine import TrainingEngine
from openppo.tracking import Metrics, PhaseTimer, Trackers, progress
from openppo.tracking.position import phase, position
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.callbacks import Callback
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.evaluation import Evaluator
from openppo.trainer.rollout_step import RolloutStep
from openppo.trainer.token_batches import TokenBatch, token_batch
from openppo.types import Prompt, Trajectory

logger = logging.getLogger("openppo")

HEADLINE = (
    "reward",
    "kl",
    "policy_loss",
    "value_loss",
    "entropy",
    "response_length",
    "eval_reward",
    "eval_pass@1",
    "time/step_s",
)
_N_LOGGED_SAMPLES = 4


@dataclass
class Parts:
    """What a PPO trainer works with: engines, scorer, data and places to report to.

    ``critic`` is None for estimators without one, ``ema`` without ``--enable_ema``, ``evaluator`` without
    ``--eval_data``. ``pack_documents_to`` is the length of rows that documents share (None: a row for each).
    """

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainingEngine
    critic: TrainingEngine | None
    engine: HFEngine
    scorer: Scorer
    maker: ExperienceMaker
    prompts: list[Prompt]
    documents: list[TokenExample]
    trackers: Trackers
    ema: ParameterAverage | None = None
    evaluator: Evaluator | None = None
    pack_documents_to: int | None = None


class PPOTrainer:
    """PPO over prompts. ``fit()`` runs it all; ``step(prompts)`` is one global step for loops of one's own.

    All ranks call every method together and with the same arguments: a trainer deals prompts out to its ranks
    by itself. ``build_ppo_trainer(config)`` makes one from options. A callback, or a loop of one's own, ends
    ``fit()`` after the step under way by setting ``should_stop``, alike on all ranks.
    """

    def __init__(self, config: TrainPPOConfig, parts: Parts, callbacks: Sequence[Callback] = ()) -> None:
        self.config = config
        self.parts = parts
        self.callbacks = list(callbacks)
        self.comm = parts.strategy.comm
        self.maker = parts.maker
        strategy, estimator = parts.strategy, parts.maker.estimator
        self.rollout_step = RolloutStep(
            strategy, parts.actor, parts.engine, parts.scorer, config, estimator.needs_greedy
        )
        self.replay_buffer = ReplayBuffer(self.comm, config.ppo.buffer_limit, config.ppo.buffer_cpu_offload)
        self.actor_step = ActorStep(parts.actor, config, self.comm, strategy.device)
        self.critic_step = None
        if parts.critic is not None:
            self.critic_step = CriticStep(parts.critic, config, self.comm, strategy.device)
        self.sampler = BatchSampler(len(parts.prompts), config.ppo.rollout_batch_size, config.deepspeed.seed)
        self.documents = self._document_batches()
        self.timer = PhaseTimer()
        normalize = config.advantage.normalize_advantages
        self.normalizes = estimator.normalize if normalize == "default" else normalize == "on"
        self.should_stop = False
        self.global_step = 0
        self.consumed_samples = 0  # prompts sampled so far
        self.consumed_batches = 0  # of ``total_steps``
        self.ended_episodes = 0

    @property
    def total_steps(self) -> int:
        """Batches of prompts in all episodes: one for each global step, or several with dynamic sampling."""
        return self.config.ppo.num_episodes * len(self.sampler)

    def fit(self) -> None:
        """Train for all episodes, evaluate and report when due, and save the actor to ``save_path``."""
        self._call("on_fit_start")
        if self.config.evaluation.eval_before_training:
            self.parts.trackers.log(self.global_step, self.evaluate())
        with progress(self.total_steps, "PPO", enabled=self.parts.strategy.is_main) as bar:
            for prompts in self.prompt_batches():
                before = self.consumed_batches - 1
                self.report(self.step(prompts))
                bar.update(self.consumed_batches - before)
                if self.should_stop:
                    break
        if self.parts.strategy.is_main and self.global_step < self.total_steps and not self.should_stop:
            logger.info("dynamic sampling has used up all prompts in %d global steps", self.global_step)
        self.save()
        self._call("on_fit_end")
        self.parts.trackers.close()

    def close(self) -> None:
        """Leave the process group; the trainer is of no use afterwards."""
        self.parts.strategy.close()

    def prompt_batches(self) -> Iterator[list[Prompt]]:
        """Every episode passes over all prompts once, in an order of its own."""
        while self.consumed_batches < self.total_steps:
            yield self._next_prompts()

    def step(self, prompts: Sequence[str | Prompt]) -> dict[str, float]:
        """One global step: sample responses to ``prompts``, score them, and update actor and critic.

        Returns the step's metrics, the same on all ranks. With ``--dynamic_sampling`` further prompts come from
        ``--prompt_data``.
        """
        metrics, position.step = Metrics(), self.global_step + 1
        with self.timer.phase("step"):
            if self.config.ppo.dynamic_sampling:
                reduced = self._train_on(self._useful_rollout(prompts, metrics), lambda: 0, metrics)
            else:
                trajectories = self._sample(prompts)
                reduced = self._train_on(trajectories, self._start_scoring(trajectories), metrics)
        reduced |= self.timer.metrics(self.comm)
        self.timer.reset()
        return reduced

    def rollout(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        """Sampled and scored responses to this rank's share of ``prompts``."""
        trajectories = self._sample(prompts)
        wait_for_scores = self._start_scoring(trajectories)
        with self.timer.phase("scoring"):
            wait_for_scores()
        return trajectories

    def train_on(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Make experience of this rank's scored trajectories and train on all ranks' for ``max_epochs``."""
        return self._train_on(trajectories, lambda: 0, Metrics())

    @phase("evaluation")
    def evaluate(self) -> dict[str, float]:
        """Metrics of the responses to ``--eval_data``, the same on all ranks; empty without such data.

        With ``--enable_ema`` it is the average that answers, as it is what ``save`` writes.
        """
        if self.parts.evaluator is None:
            return {}
        with self._weights_to_save():
            evaluation = self.parts.evaluator.evaluate(self.rollout_step.full_weights())
        samples = self._readable(evaluation.trajectories[:_N_LOGGED_SAMPLES])
        self.parts.trackers.log_samples(self.global_step, [{"evaluation": True} | sample for sample in samples])
        self._call("on_evaluate", evaluation.metrics)
        return evaluation.metrics

    def report(self, metrics: dict[str, float]) -> None:
        """Evaluate and log a step's metrics when due."""
        every, episodes = self.config.evaluation.eval_steps, self.consumed_batches // len(self.sampler)
        episode_ended, self.ended_episodes = episodes > self.ended_episodes, episodes
        last = self.consumed_batches == self.total_steps
        if last or (episode_ended if every == -1 else self.global_step % every == 0):
            metrics |= self.evaluate()
        self._call("on_step_end", metrics)
        self.should_stop = self.parts.strategy.any_rank(self.should_stop)
        if last or self.should_stop or self.global_step % self.config.run.logging_steps == 0:
            self.parts.trackers.log(self.global_step, metrics)

    @phase("saving")
    def save(self) -> None:
        """Write the actor (its average with ``--enable_ema``), and the critic if asked for, as Hugging Face folders."""
        strategy, folder = self.parts.strategy, Path(self.config.run.save_path).resolve()
        with self._weights_to_save():
            strategy.save_pretrained(self.parts.actor.module.model, folder, self.parts.tokenizer)
        if self.config.model.save_value_network and self.parts.critic is not None:
            beside = folder.with_name(folder.name + "_critic")
            strategy.save_pretrained(self.parts.critic.module.model, beside, self.parts.tokenizer)
        logger.info("saved the trained model to %s", folder)
        self._call("on_save", folder)

    def _weights_to_save(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parts.ema is None else self.parts.ema.swapped_in()

    def _next_prompts(self) -> list[Prompt]:
        episode, start = divmod(self.consumed_batches, len(self.sampler))
        self.consumed_batches += 1
        return [self.parts.prompts[i] for i in next(self.sampler.batches(episode, start))]

    def _sample(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        ready = [self._as_prompt(prompt) for prompt in prompts]
        with self.timer.phase("generation"):
            trajectories = self.rollout_step.sample(ready, first_group=self.consumed_samples)
        self.timer.count_tokens("generation", sum(sum(t.action_mask) for t in trajectories))
        self.consumed_samples += len(ready)
        return trajectories

    def _start_scoring(self, trajectories: Sequence[Trajectory]) -> Callable[[], int]:
        with self.timer.phase("scoring"):
            wait_for_scores = self.rollout_step.start_scoring(trajectories)
        self.timer.count_tokens("scoring", _count_tokens(trajectories))
        return wait_for_scores

    def _useful_rollout(self, prompts: Sequence[str | Prompt], metrics: Metrics) -> list[Trajectory]:
        """Groups with different rewards, sampled until they fill a rollout batch or one of the bounds is reached."""
        wanted, bound = self.config.ppo.rollout_batch_size, self.config.ppo.dynamic_sampling_max_batches
        kept: list[Trajectory] = []
        for n_batches in range(1, bound + 1):
            for trajectory in (sampled := self.rollout(prompts)):
                metrics.add("sampled_reward", trajectory.total_reward(self.rollout_step.weights))
            kept += self.rollout_step.useful(sampled)
            n_groups = self.rollout_step.count_groups(kept)
            if n_groups >= wanted or n_batches == bound or self.consumed_batches >= self.total_steps:
                break
            prompts = self._next_prompts()
        metrics.add("sampled_batches", n_batches, reduce="max")
        metrics.add("useful_groups", n_groups, reduce="max")
        if n_groups == 0 and self.parts.strategy.is_main:
            logger.warning(
                "dynamic sampling found no prompt whose responses got different rewards: nothing to train on"
            )
        return self.rollout_step.first_groups(kept)

    def _train_on(
        self, trajectories: Sequence[Trajectory], wait_for_scores: Callable[[], int], metrics: Metrics
    ) -> dict[str, float]:
        with self.timer.phase("experience"):
            for engine in (self.parts.actor, self.parts.critic):
                if engine is not None:
                    engine.train(False)
            experiences = self.maker.run_models(trajectories)
        with self.timer.phase("scoring"):
            metrics.add("reward_errors", wait_for_scores(), reduce="sum")
        with self.timer.phase("experience"):
            lambd_critic = 1.0 if self._pretrains_values else None
            self.replay_buffer.extend(self.maker.add_advantages(experiences, trajectories, metrics, lambd_critic))
            if self.normalizes:
                self.replay_buffer.normalize("advantages")
        n_samples = int(sum(self.comm.all_gather_object(len(self.replay_buffer))))
        with self.timer.phase("training"):
            self._train(n_samples, metrics)
        n_tokens = _count_tokens(trajectories)
        self.timer.count_tokens("experience", n_tokens)
        self.timer.count_tokens("training", n_tokens * self.config.batch.max_epochs)
        self.replay_buffer.clear()
        self.global_step += 1
        self.parts.trackers.log_samples(self.global_step, self._readable(trajectories[:_N_LOGGED_SAMPLES]))
        reduced = _with_explained_variance(metrics.reduced(self.comm))
        if "kl" in reduced:
            reduced["kl_coef"] = self.maker.kl_controller.value
            if self.global_step > frozen_actor_steps(self.config):  # before, the KL is 0 whatever the coefficient
                self.maker.kl_controller.update(reduced["kl"], n_samples)
        return reduced

    def _train(self, n_samples: int, metrics: Metrics) -> None:
        for engine in (self.parts.actor, self.parts.critic):
            if engine is not None:
                engine.train()
        batch, epochs = self.config.batch, self.config.batch.max_epochs
        n_steps = epochs * -(-n_samples // batch.train_batch_size)
        seed = self.config.deepspeed.seed + self.global_step
        batches = self.replay_buffer.mini_batches(batch.train_batch_size, batch.micro_train_batch_size, epochs, seed)
        with progress(n_steps, "training", enabled=self.parts.strategy.is_main) as bar:
            for mini_batch in batches:
                if self.global_step >= frozen_actor_steps(self.config):
                    documents = next(self.documents) if self.parts.documents else None
                    self.actor_step.train(mini_batch, documents, metrics, self.maker.kl_controller.value)
                    self.parts.engine.version += 1
                    if self.parts.ema is not None:
                        self.parts.ema.update()
                if self.critic_step is not None:
                    self.critic_step.train(mini_batch, metrics, clip=not self._pretrains_values)
                bar.update()

    @property
    def _pretrains_values(self) -> bool:
        return self.global_step < self.config.ppo.value_pretrain_steps

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def _document_batches(self) -> Iterator[TokenBatch]:
        """For each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        documents, batch = self.parts.documents, self.config.batch
        pad, pack_to = pad_token_id(self.parts.tokenizer), self.parts.pack_documents_to
        for indices in cyclic_batches(len(documents), batch.train_batch_size, self.config.deepspeed.seed):
            chosen = [documents[i] for i in indices]
            yield token_batch(chosen, batch.micro_train_batch_size, pad, self.comm, pack_to)

    def _as_prompt(self, prompt: str | Prompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        data, messages, template = self.config.data, None, self.config.data.input_template
        if data.apply_chat_template:
            messages, template = as_messages(prompt, "user", template), None
        text, ids = render_prompt(
            messages or prompt,
            self.parts.tokenizer,
            input_template=template,
            apply_chat_template=data.apply_chat_template,
        )
        if len(ids) > data.prompt_max_len:
            raise ValueError(
                f"a prompt of {len(ids)} tokens is longer than prompt_max_len {data.prompt_max_len}: {text!r}"
            )
        return Prompt(text, ids, messages=messages)

    def _readable(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        decode = self.parts.tokenizer.decode  # batch_decode([]) gives [''], and a rank may have no samples
        return [
            {
                "prompt": t.prompt.text,
                "response": decode(t.response_ids),
                "label": t.prompt.label,
                "finish_reason": t.finish_reason.value,
                "reward": t.total_reward(self.rollout_step.weights),
                "rewards": t.scores,
            }
            for t in trajectories
        ]


def _count_tokens(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(trajectory.token_ids) for trajectory in trajectories)


def _with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that knows only the mean."""
    spread = metrics.get("returns_std", 0.0) ** 2
    if spread > 0:
        metrics["explained_variance"] = 1 - metrics["value_error_std"] ** 2 / spread
    return metrics


def frozen_actor_steps(config: TrainPPOConfig) -> int:
    """Global steps at the start in which the actor stays as it is."""
    return max(config.ppo.freezing_actor_steps, config.ppo.value_pretrain_steps, 0)
