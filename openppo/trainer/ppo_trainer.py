"""The story of PPO: sample, make experience, train, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.datasets import BatchSampler
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.strategy.checkpoint.random_state import get_random_state, rewound_by
from openppo.tracking import Metrics, PhaseTimer, StepProfiler, progress_bar
from openppo.tracking.phase import phase
from openppo.trainer.callbacks import Callback
from openppo.trainer.components import PPOComponents, StepInProgress, TrainState
from openppo.trainer.overview.step_view import StepView
from openppo.trainer.ppo_data import as_prompt
from openppo.trainer.resume.checkpointer import stopped
from openppo.trainer.resume.final_save import keeping_what_was_trained
from openppo.trainer.resume.ppo_state import StartOfStep, ppo_state, restore_ppo, state_to_save
from openppo.trainer.steps.experience_step import ExperienceStep, count_tokens
from openppo.trainer.steps.rollout_step import RolloutStep
from openppo.trainer.steps.sample_log import SampleLog
from openppo.trainer.steps.update_step import UpdateStep, frozen_actor_steps
from openppo.types import Interrupted, Prompt, Trajectory

logger = logging.getLogger("openppo")

HEADLINE = (
    "reward",
    "kl",
    "clip_fraction",
    "value_loss",
    "entropy",
    "response_length",
    "eval_reward",
    "eval_pass@1",
    "time/step_s",
)
WaitForScores = Callable[[], int] | None


class PPOTrainer:
    """PPO over prompts. ``fit()`` runs it all; ``step(prompts)`` is one global step for loops of one's own.

    ``build_ppo_trainer(config)`` makes one from options. All ranks call every method together, with the same arguments:
    prompts are dealt out inside. ``should_stop``, set alike on all ranks, ends ``fit()`` after the step under way.
    """

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents, callbacks: Sequence[Callback] = ()) -> None:
        self.config = config
        self.components = parts
        self.callbacks = list(callbacks)
        self.comm = parts.strategy.comm
        self.maker = parts.maker
        self.rollout_step = RolloutStep(config, parts)
        limit, offload = config.ppo.buffer_limit, config.ppo.buffer_cpu_offload
        self.replay_buffer = ReplayBuffer(self.comm, limit, offload, config.deepspeed.zero_stage)
        self.progress = TrainState()
        self.update_step = UpdateStep(config, parts, self.progress)
        self.sampler = BatchSampler(len(parts.prompts), config.ppo.rollout_batch_size, config.deepspeed.seed)
        estimated = parts.estimate.peaks if parts.estimate else None
        self.timer = PhaseTimer(StepProfiler(config.run.save_path, config.tracking, self.comm.rank), estimated)
        self.sample_log = SampleLog(config, parts, self.total_steps)
        self.experience_step = ExperienceStep(
            config, parts, self.replay_buffer, self.update_step, self.sample_log, self.timer
        )
        self.view = StepView(config, parts)
        self.should_stop = False
        self.in_progress: StepInProgress | None = None
        self.unreported: dict[str, float] | None = None  # metrics of a step that ``report`` has not seen through
        self.start_of_step: StartOfStep | None = None
        self.reward_errors = 0  # of this rank's rollouts since the last experience

    @property
    def global_step(self) -> int:
        """Global steps done."""
        return self.progress.global_step

    @property
    def total_steps(self) -> int:
        """Batches of prompts in all episodes: one for each global step, or several with dynamic sampling."""
        return self.config.ppo.num_episodes * len(self.sampler)

    def fit(self) -> None:
        """Train for all episodes, evaluate and report when due, and save the actor to ``save_path``.

        A signal (see ``openppo.strategy.interrupt``) ends it early, with a checkpoint instead of a trained model.
        """
        with self.components.trackers:
            self._call("on_fit_start")
            try:
                self._train_all_episodes()
            except Interrupted as signal:
                self._save_interrupted(str(signal))
            else:
                self.save()
                self._call("on_fit_end")

    def close(self) -> None:
        """End the logs and leave the process group; the trainer is of no use afterwards."""
        self.components.trackers.close()
        self.components.strategy.close()

    def explain_memory(self) -> list[str]:
        """What each model takes by estimate, for a report."""
        return self.components.estimate.lines() if self.components.estimate else []

    def prompt_batches(self) -> Iterator[list[Prompt]]:
        """Every episode passes over all prompts once, in an order of its own.

        What a session before had begun is finished first.
        """
        self._finish_interrupted()
        while self.progress.consumed_batches < self.total_steps:
            self.start_of_step = (ppo_state(self), get_random_state())
            yield self._next_prompts()

    def step(self, prompts: Sequence[str | Prompt]) -> dict[str, float]:
        """One global step: sample responses to ``prompts``, score them, and update actor and critic.

        Returns the step's metrics, the same on all ranks. With ``--dynamic_sampling`` further prompts come from
        ``--prompt_data``.
        """
        self._finish_interrupted()
        metrics = Metrics()
        self.start_of_step = self.start_of_step or (ppo_state(self), get_random_state())
        with self.timer.step(self.global_step + 1):
            if self.config.ppo.dynamic_sampling:
                trajectories, scores = self._useful_rollout(prompts, metrics), None
            else:
                trajectories = self._sample(prompts)
                scores = self._start_scoring(trajectories)
            self._make_experience(trajectories, metrics, scores, recompute=False)
            reduced = self._finish_step()
        return reduced | self.timer.take_metrics(self.comm)

    def rollout(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        """Sample and score responses to this rank's share of ``prompts``."""
        self._finish_interrupted()
        with self.timer.step(self.global_step + 1):
            return self._scored(prompts)

    def train_on(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Make experience of this rank's scored trajectories and train on all ranks' for ``max_epochs``.

        The actor recomputes their log-probs, whatever ``--old_log_probs`` says.
        """
        self._finish_interrupted()
        self.start_of_step = self.start_of_step or (ppo_state(self), get_random_state())
        with self.timer.step(self.global_step + 1):
            self._make_experience(trajectories, Metrics())
            reduced = self._finish_step()
        return reduced | self.timer.take_metrics(self.comm)

    @phase("evaluation")
    @rewound_by(Interrupted)
    def evaluate(self) -> dict[str, float]:
        """Metrics of the responses to ``--eval_data``, the same on all ranks; empty without such data.

        With ``--enable_ema`` it is the average that answers, as it is what ``save`` writes.
        """
        if self.components.evaluator is None:
            return {}
        evaluation = self.components.evaluator.evaluate(self._weights_that_answer())
        with self._weights_to_save():
            self.sample_log.write_evaluation(self.global_step, evaluation.trajectories)
        self._call("on_evaluate", evaluation.metrics)
        return evaluation.metrics

    def report(self, metrics: dict[str, float]) -> None:
        """Evaluate, log, and save a checkpoint when due."""
        self.unreported = dict(metrics)
        position, every = self.progress, self.config.evaluation.eval_steps
        last = position.consumed_batches == self.total_steps
        episode_ended = (episodes := position.consumed_batches // len(self.sampler)) > position.ended_episodes
        due = last or (episode_ended if every == -1 else position.global_step % every == 0)
        evaluated = self.evaluate() if due else {}
        metrics |= evaluated
        if due and self.components.checkpointer is not None:
            self.components.checkpointer.look_at(position.global_step, metrics, self._write_model)
        position.ended_episodes = episodes
        self._call("on_step_end", metrics)
        self.should_stop = self.components.strategy.any_rank(self.should_stop)
        if evaluated or last or self.should_stop or position.global_step % self.config.run.logging_steps == 0:
            self.components.trackers.log(position.global_step, metrics)
        self.unreported = None
        if (saver := self.components.checkpointer) and (
            self.should_stop or saver.due(position.global_step, episode_ended)
        ):
            self.save_checkpoint()

    @phase("saving")
    def save(self) -> None:
        """Write the actor (its average with ``--enable_ema``), and the critic if asked for, as Hugging Face folders."""
        folder = Path(self.config.run.save_path).resolve()
        with keeping_what_was_trained(self.components.checkpointer, self.global_step, self.save_checkpoint):
            self._write_model(folder)
            if self.config.model.save_value_network and self.components.critic is not None:
                beside = folder.with_name(folder.name + "_critic")
                self.components.strategy.save_pretrained(
                    self.components.critic.module.model, beside, self.components.tokenizer
                )
        logger.info("saved the trained model to %s", folder)
        self._call("on_save", folder)

    @phase("saving")
    def save_checkpoint(self) -> Path:
        """Write all that ``--load_checkpoint`` needs to go on from here; between steps, or after ``Interrupted``.

        Raises ``CheckpointError`` on all ranks when the disk is full or cannot be written.
        """
        assert self.components.checkpointer is not None, "build_ppo_trainer makes a checkpointer"
        state, experience, random_state = state_to_save(self)
        return self.components.checkpointer.save(self.global_step, state, self._write_model, experience, random_state)

    def load_checkpoint(self) -> None:
        """Go on from the checkpoint that ``--load_checkpoint`` has found, as if the run had never stopped."""
        assert self.components.checkpointer is not None
        restore_ppo(self, *self.components.checkpointer.load())

    def _train_all_episodes(self) -> None:
        position = self.progress
        with progress_bar(self.total_steps, "PPO", enabled=self.components.strategy.is_main) as bar:
            bar.update(position.consumed_batches)
            self._finish_interrupted()
            if self.config.evaluation.eval_before_training and not position.has_begun:
                self.components.trackers.log(self.global_step, self.evaluate())
                self.should_stop = self.components.strategy.any_rank(self.should_stop)
            position.has_begun = True
            for prompts in self.prompt_batches() if not self.should_stop else ():
                before = position.consumed_batches - 1
                self.report(self.step(prompts))
                bar.update(position.consumed_batches - before)
                if self.should_stop:
                    break
        if self.components.strategy.is_main and self.global_step < self.total_steps and not self.should_stop:
            logger.info("dynamic sampling has used up all prompts in %d global steps", self.global_step)

    def _finish_interrupted(self) -> None:
        """What the session before had begun: the training of a step, or its report."""
        if self.in_progress is not None:
            with self.timer.step(self.global_step + 1):
                metrics = self._finish_step()
            self.report(metrics | self.timer.take_metrics(self.comm))
        elif self.unreported is not None:
            self.report(self.unreported)

    def _save_interrupted(self, signal: str) -> None:
        logger.info(stopped(signal, self.global_step, self.total_steps, self.save_checkpoint()))

    def _write_model(self, folder: Path) -> None:
        with self._weights_to_save():
            self.components.strategy.save_pretrained(
                self.components.actor.module.model, folder, self.components.tokenizer
            )

    @contextmanager
    def _weights_that_answer(self) -> Iterator[None]:
        """Closed before scoring, where one rank alone may raise."""
        with self._weights_to_save(), self.rollout_step.full_weights():
            yield

    def _weights_to_save(self) -> AbstractContextManager[None]:
        return nullcontext() if self.components.ema is None else self.components.ema.swapped_in()

    def _next_prompts(self) -> list[Prompt]:
        episode, start = divmod(self.progress.consumed_batches, len(self.sampler))
        self.progress.consumed_batches += 1
        return [self.components.prompts[i] for i in next(self.sampler.batches(episode, start))]

    def _sample(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        ready = [as_prompt(prompt, self.components.tokenizer, self.config.data) for prompt in prompts]
        with self.timer.phase("generation"):
            trajectories = self.rollout_step.sample(ready, first_group=self.progress.consumed_samples)
        self.timer.count_tokens("generation", sum(sum(t.action_mask) for t in trajectories))
        self.progress.consumed_samples += len(ready)
        return trajectories

    def _scored(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        trajectories = self._sample(prompts)
        self._wait(self._start_scoring(trajectories))
        return trajectories

    def _start_scoring(self, trajectories: Sequence[Trajectory]) -> Callable[[], int]:
        with self.timer.phase("scoring"):
            wait_for_scores = self.rollout_step.start_scoring(trajectories)
        self.timer.count_tokens("scoring", count_tokens(trajectories))
        return wait_for_scores

    def _wait(self, wait_for_scores: Callable[[], int]) -> None:
        """Counts errors; ``Interrupted`` on all ranks when the wait is to be left."""
        with self.timer.phase("scoring"), suppress(Interrupted):  # other ranks may not know yet
            self.reward_errors += wait_for_scores()
        self.components.stop()

    def _useful_rollout(self, prompts: Sequence[str | Prompt], metrics: Metrics) -> list[Trajectory]:
        """Groups with different rewards, sampled until they fill a rollout batch or one of the bounds is reached."""
        wanted, bound = self.config.ppo.rollout_batch_size, self.config.ppo.dynamic_sampling_max_batches
        kept: list[Trajectory] = []
        for n_batches in range(1, bound + 1):
            for trajectory in (sampled := self._scored(prompts)):
                metrics.add("sampled_reward", trajectory.total_reward(self.rollout_step.weights))
            kept += self.rollout_step.useful(sampled)
            n_groups = self.rollout_step.count_groups(kept)
            if n_groups >= wanted or n_batches == bound or self.progress.consumed_batches >= self.total_steps:
                break
            prompts = self._next_prompts()
        metrics.add("sampled_batches", n_batches, reduce="max")
        metrics.add("useful_groups", n_groups, reduce="max")
        return self.rollout_step.first_groups(kept)

    def _make_experience(
        self, trajectories: Sequence[Trajectory], metrics: Metrics, scores: WaitForScores = None, recompute: bool = True
    ) -> None:
        """Fill the replay buffer; from here on the step is in progress."""

        def wait_for_scores() -> None:
            if scores is not None:
                self._wait(scores)
            metrics.add("reward_errors", self.reward_errors, reduce="sum")
            self.reward_errors = 0

        self.in_progress = self.experience_step.make(trajectories, metrics, recompute, wait_for_scores)

    def _finish_step(self) -> dict[str, float]:
        """Train on the replay buffer; the step's metrics but for its times."""
        step = self.in_progress
        assert step is not None, "no experience to train on"
        self.view.before_training(self.global_step + 1, self.replay_buffer, self.maker.kl_controller.value)
        with self.timer.phase("training"):
            self.update_step.train(self.replay_buffer, step, self.maker.kl_controller.value)
        self.timer.count_tokens("training", step.n_tokens * self.config.batch.max_epochs)
        self.replay_buffer.clear()
        self.in_progress, self.start_of_step = None, None
        self.progress.global_step += 1
        self.sample_log.write(self.global_step, step.samples)
        reduced = _with_explained_variance(step.metrics.reduced(self.comm))
        reduced["skipped_steps"] = float(self.update_step.skipped.total)
        if "kl" in reduced:
            reduced["kl_coef"] = self.maker.kl_controller.value
            if self.global_step > frozen_actor_steps(self.config):  # before, the KL is 0 whatever the coefficient
                self.maker.kl_controller.update(reduced["kl"], step.n_samples)
        return reduced

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)


def _with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that knows only the mean."""
    spread = metrics.get("returns_std", 0.0) ** 2
    if spread > 0:
        metrics["explained_variance"] = 1 - metrics["value_error_std"] ** 2 / spread
    return metrics
