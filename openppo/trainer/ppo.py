"""The PPO loop: sample, make experience, train, report."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.rollout.failures import NothingTrainedError
from openppo.rollout.rollout import Rollout
from openppo.sources.synchronous import PromptSource
from openppo.strategy.checkpoint.random_state import RandomState, get_random_state
from openppo.strategy.fault_report import ExplainMemory
from openppo.tracking import Metrics, progress_bar
from openppo.tracking.phase import evaluation, phase
from openppo.trainer.callbacks import STOPPED_EARLY, Callback, notify
from openppo.trainer.checkpointer import ended_by_failures, ensure_checkpoint_on_save_error, stopped
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation.evaluator import evaluate_alone
from openppo.trainer.evaluation.held_out_kl import measure_held_out_kl
from openppo.trainer.evaluation.passing import PassWatch
from openppo.trainer.memory.shortage import explain_shortage
from openppo.trainer.resume.trainer_state import restore_trainer, trainer_state
from openppo.trainer.sample_log import StepDiagnostics
from openppo.trainer.update import Update
from openppo.types import Interrupted, Prompt, RolloutSource, Sample


class PPOTrainer:
    """PPO trainer on the samples of ``source``: ``fit()`` for whole runs, ``step(prompts)`` for custom loops.

    ``build_ppo_trainer(config)`` makes one from options. All ranks call every method together, with the same prompts or
    their own samples. Setting ``should_stop`` on any rank ends ``fit()`` after the current step.
    """

    def __init__(
        self,
        config: TrainPPOConfig,
        components: PPOComponents,
        source: RolloutSource,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config = config
        self.components = components
        self.source = source
        self.callbacks = list(callbacks)
        self.comm = components.strategy.comm
        self.state = components.state
        self.maker = components.maker
        self.replay_buffer = _replay_buffer(config, components)
        self.update = Update(config, components)
        self.planned_steps = source.steps or self.total_steps
        self.view = StepDiagnostics(config, components, self.total_steps)
        self.update.actor_step.observe = self.view.observe
        self.pass_watch = PassWatch(self.comm)
        self.should_stop = False
        self.explain_memory: ExplainMemory = partial(explain_shortage, components.estimate)
        """Compares estimated and measured memory in a fault report."""

    def fit(self) -> None:
        """Train to the end, evaluate and report when due, and save the actor.

        With ``--val_only``, only evaluate. A signal (see ``openppo.strategy.signals``) ends it early, with a checkpoint
        instead of a trained model.
        """
        if self.config.evaluation.val_only:
            return evaluate_alone(self)
        with self._session():
            for samples in self._rollouts():
                self.report(self.train_on(samples))
                self.source.publish(self.global_step)

    def step(self, prompts: Sequence[str | Prompt]) -> dict[str, float]:
        """Take a global step on responses to ``prompts``; return its metrics, the same on all ranks."""
        return self.train_on(self.rollout(prompts))

    def rollout(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Sample and score responses to this rank's share of ``prompts``; the first read waits for the scores."""
        return _prompt_source(self.source).rollout(prompts)

    def train_on(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take a global step on the samples of all ranks, and return its metrics."""
        metrics = Metrics()
        # they still hold the last step if it was never reported
        self.replay_buffer.clear()
        self.view.observed.clear()

        with self.maker.hooks.timer.step(self.state.global_step + 1):
            experience = self.maker.make(samples, metrics, self.global_step)
            self.replay_buffer.fill(experience)
            reduced = self.update(self.replay_buffer, metrics)

        self.view.trained_on = samples
        n_rollout_ranks = self.config.orchestrator.rollout_ranks
        return reduced | self.maker.hooks.timer.take_metrics(self.comm, n_rollout_ranks)

    @evaluation
    def evaluate(self) -> dict[str, float]:
        """Return metrics of responses to held-out prompts, the same on all ranks; empty if there are none."""
        samples = self.source.evaluate()
        if self.config.measures_held_out_kl and isinstance(samples, Rollout):
            with self.components.weights_to_save():
                measure_held_out_kl(self.maker, samples, samples.metrics)
        grading = self.components.grading
        if grading.scorer is None:
            self.maker.reward_names.check(samples)
        is_last = self.config.evaluation.val_only or self.global_step >= self.total_steps
        self.pass_watch.look(grading, samples, is_last)

        metrics = grading.measure(samples)
        self.components.card.note(self.global_step, metrics)
        if metrics:
            self.view.show_evaluation(self.global_step, samples)
            notify(self.callbacks, "on_evaluate", self, metrics)
        return metrics

    def report(self, metrics: dict[str, float]) -> None:
        """Log samples and metrics of a step; evaluate, and save a checkpoint, when due."""
        state = self.state
        checkpointer = self.components.checkpointer
        self._take_snapshot()
        metrics["episode"] = self._passes_done()
        state.unreported = dict(metrics)
        self.view.show_step(state.global_step, self.replay_buffer, metrics)

        is_last = state.global_step == self.total_steps
        episode_ended = int(metrics["episode"]) > state.ended_episodes
        eval_steps = self.config.evaluation.eval_steps
        is_due = episode_ended if eval_steps == -1 else state.global_step % eval_steps == 0
        evaluated: dict[str, float] = {}
        if is_last or is_due:
            evaluated = self.evaluate()
            metrics |= evaluated
            checkpointer.save_if_best(state.global_step, metrics, self.components.write_policy)
        state.ended_episodes = int(metrics["episode"])

        notify(self.callbacks, "on_step_end", self, metrics)
        self.should_stop = self.components.strategy.any_rank(self.should_stop)
        is_logged = state.global_step % self.config.run.logging_steps == 0
        if evaluated or is_last or self.should_stop or is_logged:
            self.components.trackers.log(state.global_step, metrics)
        state.unreported = None
        if self.should_stop or checkpointer.due(state.global_step, episode_ended or is_last):
            self.save_checkpoint()

    @phase("saving")
    def save(self) -> None:
        """Write the actor, or its average with ``--enable_ema``, as a Hugging Face folder.

        With ``--save_value_network``, write the critic beside it.
        """
        folder = Path(self.config.run.save_path).resolve()
        with ensure_checkpoint_on_save_error(
            self.components.checkpointer, self.global_step, self.save_checkpoint
        ):
            self.components.write_policy(folder)
            if self.config.model.save_value_network:
                self.components.write_critic(folder.with_name(folder.name + "_critic"))
        logger.info("saved the trained model to %s", folder)
        notify(self.callbacks, "on_save", self, folder)

    @phase("saving")
    def save_checkpoint(self, random_state: RandomState | None = None) -> Path:
        """Write a checkpoint of the last step; ``random_state`` defaults to the current one."""
        return self.components.checkpointer.save(
            self.global_step,
            trainer_state(self),
            self.components.write_policy,
            random_state=random_state,
        )

    def load_checkpoint(self) -> None:
        """Resume from the checkpoint of ``--load_checkpoint``, as if the run had never stopped."""
        self.should_stop = restore_trainer(self, self.components.checkpointer.load())
        self.source.publish(self.global_step)

    def prompt_batches(self) -> Iterator[list[Prompt]]:
        """Yield batches for ``step``, at most one for each remaining step.

        They pass over all prompts ``--num_episodes`` times, reshuffled each time. A batch counts as consumed only once
        it is sampled from, so ``list(trainer.prompt_batches())`` changes nothing.
        """
        if self.state.unreported is not None:
            self.report(self.state.unreported)
        batches = _prompt_source(self.source).prompt_batches()
        for _ in range(self.total_steps - self.global_step):
            batch = next(batches, None)
            if batch is None or self.global_step >= self.total_steps:
                return
            yield batch

    def close(self) -> None:
        """End the logs and wait for all ranks; afterwards another trainer may be built."""
        self.source.close()
        self.components.trackers.close()
        self.components.strategy.close()

    @property
    def global_step(self) -> int:
        """Global steps done."""
        return self.state.global_step

    @property
    def total_steps(self) -> int:
        """Global steps of the whole run; an upper bound with dynamic sampling."""
        limits = (self.source.steps, self.config.ppo.max_steps)
        return min(n for n in limits if n is not None)

    def _passes_done(self) -> float:
        """Passes over the prompts so far; steps whose prompts dynamic sampling has used up count as done."""
        used_up = self.planned_steps - (self.source.steps or self.total_steps)
        done = used_up + self.state.global_step
        return done * self.config.ppo.num_episodes / self.planned_steps

    def _rollouts(self) -> Iterator[Sequence[Sample]]:
        """Yield the samples of each remaining step, until ``should_stop``."""
        strategy = self.components.strategy
        source = iter(self.source)
        with progress_bar(self.total_steps, "PPO", enabled=strategy.is_main) as bar:
            bar.update(self.global_step)
            while self.global_step < self.total_steps and not strategy.any_rank(self.should_stop):
                self._take_snapshot()
                self.components.stop()
                samples = next(source, None)
                if samples is None:
                    self._end_early()
                    return
                yield samples
                # dynamic sampling may have used up prompts of later steps
                bar.update(total=self.total_steps)

    def _end_early(self) -> None:
        """Evaluate and save as after the last step, because the source has ended early."""
        logger.info("no more samples after %d of %d steps", self.global_step, self.total_steps)
        evaluated = self.evaluate()
        if evaluated:
            self.components.trackers.log(self.global_step, evaluated)
        if self.components.checkpointer.due(self.global_step, True):
            self.save_checkpoint()

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Open the logs and make overdue reports before the steps of ``fit``; save the outcome after them."""
        with self.components.trackers:
            notify(self.callbacks, "on_fit_start", self)
            if self.should_stop:
                logger.info(STOPPED_EARLY)
            self._take_snapshot()

            try:
                # an earlier session may have stopped during a report
                if self.state.unreported is not None:
                    self.report(self.state.unreported)
                if self.config.evaluation.eval_before_training and not self.state.has_begun:
                    self.components.trackers.log(self.global_step, self.evaluate())
                self.state.has_begun = True
                yield
            except Interrupted as signal:
                path = self._save_before_step()
                message = stopped(str(signal), self.global_step, self.total_steps, checkpoint=path)
                logger.info(message)
            except NothingTrainedError as failure:
                self.view.show_failed(self.global_step + 1, failure.failed)
                raise ended_by_failures(failure, self._save_before_step()) from None
            else:
                self.save()
                notify(self.callbacks, "on_fit_end", self)

    def _save_before_step(self) -> Path:
        """Drop the current step and write a checkpoint of the state before it."""
        source_state, random_state = self._snapshot
        self.source.load_state_dict(source_state)
        return self.save_checkpoint(random_state)

    def _take_snapshot(self) -> None:
        """Snapshot source and random state; signals and failures roll back to them."""
        self._snapshot = self.source.state_dict(), get_random_state()


def _replay_buffer(config: TrainPPOConfig, components: PPOComponents) -> ReplayBuffer:
    """Make the empty replay buffer of this rank."""
    ppo = config.ppo
    estimator = components.maker.estimator
    return ReplayBuffer(
        components.strategy.comm,
        limit=ppo.buffer_limit,
        cpu_offload=ppo.buffer_cpu_offload,
        zero_stage=config.deepspeed.zero_stage,
        normalizes=estimator.normalizes(config.advantage.normalize_advantages),
        shares_prompts=ppo.share_prompts == "auto",
    )


def _prompt_source(source: RolloutSource) -> PromptSource:
    """Return ``source`` if it takes prompts; ``TypeError`` otherwise."""
    if not isinstance(source, PromptSource):
        raise TypeError(
            f"{type(source).__name__} takes no prompts: iterate over trainer.source instead."
        )
    return source
