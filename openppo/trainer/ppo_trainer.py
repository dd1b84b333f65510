"""The story of PPO: sample, make experience, train, report."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets import BatchSampler, TokenExample, cyclic_batches, render_prompt, shard
from openppo.experience.maker import ExperienceMaker
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.loading import pad_token_id
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.rewards import Scorer
from openppo.rollout.rollout import sample_trajectories
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.engine import TrainingEngine
from openppo.tracking import Metrics, PhaseTimer, Trackers, progress
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.token_batches import TokenBatch, token_batch
from openppo.types import Prompt, SamplingParams, Trajectory

logger = logging.getLogger("openppo")

HEADLINE = ("reward", "kl", "policy_loss", "value_loss", "entropy", "response_length", "time/step_s")
_N_LOGGED_SAMPLES = 4


@dataclass
class Parts:
    """What a PPO trainer works with: engines, scorer, data and places to report to."""

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainingEngine
    critic: TrainingEngine
    engine: HFEngine
    scorer: Scorer
    maker: ExperienceMaker
    prompts: list[Prompt]
    documents: list[TokenExample]
    trackers: Trackers


class PPOTrainer:
    """PPO over prompts. ``fit()`` runs it all; ``step(prompts)`` is one global step for loops of one's own.

    All ranks call every method together and with the same arguments: a trainer deals prompts out to its ranks
    by itself. ``build_ppo_trainer(config)`` makes one from options.
    """

    def __init__(self, config: TrainPPOConfig, parts: Parts) -> None:
        self.config = config
        self.parts = parts
        self.comm = parts.strategy.comm
        self.maker = parts.maker
        self.replay_buffer = ReplayBuffer(self.comm, config.ppo.buffer_limit, config.ppo.buffer_cpu_offload)
        self.actor_step = ActorStep(parts.actor, config.ppo, self.comm, parts.strategy.device)
        self.critic_step = CriticStep(parts.critic, config.ppo, self.comm, parts.strategy.device)
        self.sampler = BatchSampler(len(parts.prompts), config.ppo.rollout_batch_size, config.deepspeed.seed)
        self.documents = self._document_batches()
        self.timer = PhaseTimer()
        self.global_step = 0
        self.consumed_samples = 0

    @property
    def total_steps(self) -> int:
        """Global steps of ``fit()``."""
        return self.config.ppo.num_episodes * len(self.sampler)

    def fit(self) -> None:
        """Train for all episodes, report, and save the actor to ``save_path``."""
        with progress(self.total_steps, "PPO", enabled=self.parts.strategy.is_main) as bar:
            for prompts in self.prompt_batches():
                metrics = self.step(prompts)
                self.report(metrics)
                bar.update()
        self.save()
        self.parts.trackers.close()

    def close(self) -> None:
        """Leave the process group; the trainer is of no use afterwards."""
        self.parts.strategy.close()

    def prompt_batches(self) -> Iterator[list[Prompt]]:
        """Every episode passes over all prompts once, in an order of its own."""
        for episode in range(self.config.ppo.num_episodes):
            for indices in self.sampler.batches(episode):
                yield [self.parts.prompts[i] for i in indices]

    def step(self, prompts: Sequence[str | Prompt]) -> dict[str, float]:
        """One global step: sample responses to ``prompts``, score them, and update actor and critic.

        Returns the step's metrics, the same on all ranks.
        """
        with self.timer.phase("step"):
            trajectories = self.rollout(prompts)
            metrics = self.train_on(trajectories)
        metrics |= self.timer.metrics(self.comm)
        self.timer.reset()
        return metrics

    def rollout(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        """Sampled and scored responses to this rank's share of ``prompts``."""
        ready = [self._as_prompt(prompt) for prompt in prompts]
        mine = shard(ready, self.comm.rank, self.comm.world_size)
        first = self.consumed_samples + self.comm.rank * len(ready) // self.comm.world_size
        self.parts.actor.train(False)
        lockstep = self.parts.engine.any_rank_busy is not None
        weights = nullcontext() if lockstep else self.parts.strategy.gathered(self.parts.actor)
        with self.timer.phase("generation"), weights:
            trajectories = sample_trajectories(
                self.parts.engine,
                mine,
                self._sampling_params(),
                self.config.ppo.n_samples_per_prompt,
                self.config.deepspeed.seed,
                first,
            )
        self.timer.count_tokens("generation", sum(sum(t.action_mask) for t in trajectories))
        self.consumed_samples += len(ready)
        with self.timer.phase("scoring"):
            for trajectory, score in zip(trajectories, self.parts.scorer.score(trajectories), strict=True):
                trajectory.scores["reward"] = score
        self.timer.count_tokens("scoring", _count_tokens(trajectories))
        return trajectories

    def train_on(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Make experience of this rank's trajectories and train on all ranks' for ``max_epochs``."""
        metrics = Metrics()
        with self.timer.phase("experience"):
            self.parts.actor.train(False)
            self.parts.critic.train(False)
            self.replay_buffer.extend(self.maker.make(trajectories, metrics))
            self.replay_buffer.normalize("advantages")
        with self.timer.phase("training"):
            self._train(metrics)
        n_tokens = _count_tokens(trajectories)
        self.timer.count_tokens("experience", n_tokens)
        self.timer.count_tokens("training", n_tokens * self.config.batch.max_epochs)
        self.replay_buffer.clear()
        self.global_step += 1
        self.parts.trackers.log_samples(self.global_step, self._readable(trajectories[:_N_LOGGED_SAMPLES]))
        return _with_explained_variance(metrics.reduced(self.comm))

    def report(self, metrics: dict[str, float]) -> None:
        """Log a step's metrics when due."""
        if self.global_step % self.config.run.logging_steps == 0 or self.global_step == self.total_steps:
            self.parts.trackers.log(self.global_step, metrics)

    def save(self) -> None:
        """Write the actor, and the critic if asked for, as Hugging Face folders with tokenizer."""
        strategy, folder = self.parts.strategy, Path(self.config.run.save_path).resolve()
        strategy.save_pretrained(self.parts.actor.module.model, folder, self.parts.tokenizer)
        if self.config.model.save_value_network:
            beside = folder.with_name(folder.name + "_critic")
            strategy.save_pretrained(self.parts.critic.module.model, beside, self.parts.tokenizer)
        logger.info("saved the trained model to %s", folder)

    def _train(self, metrics: Metrics) -> None:
        self.parts.actor.train()
        self.parts.critic.train()
        batch, epochs = self.config.batch, self.config.batch.max_epochs
        n_samples = int(sum(self.comm.all_gather_object(len(self.replay_buffer))))
        n_steps = epochs * -(-n_samples // batch.train_batch_size)
        seed = self.config.deepspeed.seed + self.global_step
        batches = self.replay_buffer.mini_batches(batch.train_batch_size, batch.micro_train_batch_size, epochs, seed)
        with progress(n_steps, "training", enabled=self.parts.strategy.is_main) as bar:
            for mini_batch in batches:
                documents = next(self.documents) if self.parts.documents else None
                self.actor_step.train(mini_batch, documents, metrics)
                self.critic_step.train(mini_batch, metrics)
                self.parts.engine.version += 1
                bar.update()

    def _document_batches(self) -> Iterator[TokenBatch]:
        """For each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        documents, batch = self.parts.documents, self.config.batch
        pad = pad_token_id(self.parts.tokenizer)
        for indices in cyclic_batches(len(documents), batch.train_batch_size, self.config.deepspeed.seed):
            yield token_batch([documents[i] for i in indices], batch.micro_train_batch_size, pad, self.comm)

    def _as_prompt(self, prompt: str | Prompt) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        data = self.config.data
        text, ids = render_prompt(
            prompt,
            self.parts.tokenizer,
            input_template=data.input_template,
            apply_chat_template=data.apply_chat_template,
        )
        if len(ids) > data.prompt_max_len:
            raise ValueError(
                f"a prompt of {len(ids)} tokens is longer than prompt_max_len {data.prompt_max_len}: {text!r}"
            )
        return Prompt(text, ids)

    def _sampling_params(self) -> SamplingParams:
        options = self.config.generation
        return SamplingParams(options.generate_max_len, options.temperature, options.top_p, options.top_k)

    def _readable(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        decode = self.parts.tokenizer.decode  # batch_decode([]) gives [''], and a rank may have no samples
        return [
            {"prompt": t.prompt.text, "response": decode(t.response_ids), "finish_reason": t.finish_reason.value}
            | t.scores
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
