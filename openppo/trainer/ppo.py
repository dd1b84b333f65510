"""The PPO loop: sample, make experience, train, report."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from openppo.config import TrainPPOConfig
from openppo.rollout.rollout import Rollout
from openppo.sources.synchronous import prompt_source
from openppo.strategy.checkpoint.random_state import RandomState
from openppo.tracking import Metrics
from openppo.tracking.phase import evaluation, phase
from openppo.trainer.callbacks import Callback, notify
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation.held_out import evaluate_alone, evaluate_policy
from openppo.trainer.evaluation.passing import PassWatch
from openppo.trainer.resume.trainer_state import restore_trainer, trainer_state
from openppo.trainer.rollback import Rollback
from openppo.trainer.run_length import RunLength
from openppo.trainer.sample_log import StepDiagnostics
from openppo.trainer.session import remaining_batches, rollouts, save_models, session
from openppo.trainer.step_end import reporting
from openppo.trainer.update import Update
from openppo.types import Prompt, RolloutSource, Sample


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
        self.replay_buffer = components.replay_buffer
        self.explain_memory = components.explain_memory
        self.length = RunLength(config, source)
        self.rollback = Rollback(source)
        self.view = StepDiagnostics(config, components, self.total_steps)
        self.update = Update.of(config, components, observe=self.view.observe)
        self.pass_watch = PassWatch(self.comm)
        self.should_stop = False

    def fit(self) -> None:
        """Train to the end, evaluate and report when due, and save the actor.

        With ``--val_only``, only evaluate. A signal (see ``openppo.strategy.signals``) ends it early, with a checkpoint
        instead of a trained model.
        """
        if self.config.evaluation.val_only:
            return evaluate_alone(self)
        with session(self):
            for samples in rollouts(self):
                self.report(self.train_on(samples))
                self.source.publish(self.global_step)

    def step(self, prompts: Sequence[str | Prompt]) -> dict[str, float]:
        """Take a global step on responses to ``prompts``; return its metrics, the same on all ranks."""
        return self.train_on(self.rollout(prompts))

    def rollout(self, prompts: Sequence[str | Prompt]) -> Rollout:
        """Sample and score responses to this rank's share of ``prompts``; the first read waits for the scores."""
        return prompt_source(self.source).rollout(prompts)

    def train_on(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take a global step on the samples of all ranks, and return its metrics."""
        metrics = Metrics()
        # they still hold the last step if it was never reported
        self.replay_buffer.clear()
        self.view.begin_step()

        timer = self.maker.hooks.timer
        with timer.step(self.state.global_step + 1):
            experience = self.maker.make(samples, metrics, self.global_step)
            self.replay_buffer.fill(experience)
            reduced = self.update(self.replay_buffer, samples, metrics)

        self.view.keep(samples)
        return reduced | timer.take_metrics(self.comm, self.config.orchestrator.rollout_ranks)

    def report(self, metrics: dict[str, float]) -> None:
        """Show a step, evaluate, keep the best, call callbacks, agree on stopping, log and save, in this order."""
        self.rollback.mark()
        metrics["episode"] = self.length.episodes(self.global_step)
        self.state.begin_report(metrics)
        notify(reporting(self.callbacks), "on_step_end", self, metrics)

    @evaluation
    def evaluate(self) -> dict[str, float]:
        """Return metrics of responses to held-out prompts, the same on all ranks; empty if there are none."""
        return evaluate_policy(self)

    @phase("saving")
    def save(self) -> None:
        """Write the actor, or its average with ``--ema_beta``, as a Hugging Face folder.

        With ``--save_value_network``, write the critic beside it.
        """
        save_models(self)

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
        return remaining_batches(self)

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
        return self.length.steps
