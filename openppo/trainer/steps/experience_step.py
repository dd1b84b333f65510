"""From sampled responses, whose scores may still be on their way, to a replay buffer to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from openppo.config import TrainPPOConfig
from openppo.experience.collate import join_rows
from openppo.experience.measure import measure_experience, measure_staleness
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.tracking import Metrics, PhaseTimer
from openppo.trainer.components import PPOComponents, StepInProgress
from openppo.trainer.steps.sample_log import SampleLog
from openppo.trainer.steps.update_step import UpdateStep
from openppo.types import Experience, Trajectory


class ExperienceStep:
    """Fills a replay buffer. All ranks call ``make`` together.

    Where one optimizer step trains on all samples of a rollout (at once), it begins with the weights that experience is
    made with. Its forward passes give what others would give before it: the critic's values and, in bfloat16, the
    actor's old log-probs. Those others are left out then.
    """

    def __init__(
        self,
        config: TrainPPOConfig,
        parts: PPOComponents,
        buffer: ReplayBuffer,
        update_step: UpdateStep,
        sample_log: SampleLog,
        timer: PhaseTimer,
    ) -> None:
        self.config = config
        self.components = parts
        self.comm = parts.strategy.comm
        self.maker = parts.maker
        self.buffer = buffer
        self.update_step = update_step
        self.sample_log = sample_log
        self.timer = timer
        self.normalizes = self.maker.estimator.normalizes(config.advantage.normalize_advantages)

    def make(
        self,
        trajectories: Sequence[Trajectory],
        metrics: Metrics,
        recompute: bool,
        wait_for_scores: Callable[[], None],
    ) -> StepInProgress:
        """Run the models, wait until ``trajectories`` have scores, and complete the experience: a step can begin.

        ``recompute`` has the actor compute old log-probs, whatever ``--old_log_probs`` says. ``Interrupted`` and
        ``FloatingPointError`` as of ``UpdateStep.train``; then the step must begin anew.
        """
        n_tokens = count_tokens(trajectories)
        with self.timer.phase("experience"), self.components.strategy.uncompiled():
            at_once = 0 < self._count(trajectories) <= self.config.batch.train_batch_size
            critic_first = at_once and self.components.critic is not None and self.config.may_train_critic_first
            source = self.config.old_log_probs_from(at_once and self.update_step.trains_actor)
            self.components.train(False)
            experiences = self.maker.run_models(
                trajectories, old_log_probs="recompute" if recompute else source, values=not critic_first
            )
        wait_for_scores()
        measure_staleness(trajectories, self.update_step.position.policy_version, metrics)
        step = StepInProgress(metrics, n_samples=0, n_tokens=n_tokens, samples=[])
        self.buffer.clear()  # of a step that was left
        lambd_critic = 1.0 if self.update_step.pretrains_values else None
        if critic_first:
            self._fill_and_train_critic(experiences, trajectories, step, lambd_critic)
        else:
            with self.timer.phase("experience"):
                self.buffer.extend(self.maker.add_advantages(experiences, trajectories, metrics, lambd_critic))
        with self.timer.phase("experience"):
            if self.normalizes:
                self.buffer.normalize("advantages")
        self.timer.count_tokens("experience", n_tokens)
        step.n_samples = self._count(self.buffer.items)
        step.samples = self.sample_log.describe(trajectories, self.buffer, self.update_step.position.global_step + 1)
        return step

    def _fill_and_train_critic(
        self,
        experiences: Sequence[Experience],
        trajectories: Sequence[Trajectory],
        step: StepInProgress,
        lambd_critic: float | None,
    ) -> None:
        with self.timer.phase("experience"):
            batch = self.maker.add_rewards(experiences, trajectories, step.metrics)
            self.buffer.extend([] if batch is None else [batch])
        with self.timer.phase("training"):
            self.update_step.train_critic_first(
                self.buffer, step, lambda micro: self.maker.add_returns(micro, lambd_critic)
            )
        with self.timer.phase("experience"):
            if len(self.buffer) > 0:
                measure_experience(join_rows(self.buffer.items).to(self.components.strategy.device), step.metrics)

    def _count(self, samples: Sequence[object]) -> int:
        """Over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len(samples))))


def count_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Of prompts and responses."""
    return sum(len(trajectory.token_ids) for trajectory in trajectories)
