"""From sampled responses, whose scores may still be on their way, to a replay buffer to train on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openppo.config import TrainPPOConfig
from openppo.experience.collate import join_rows
from openppo.experience.measure import measure_experience
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.tracking import Metrics, PhaseTimer
from openppo.trainer.parts import Parts, StepInProgress
from openppo.trainer.steps.sample_log import SampleLog
from openppo.trainer.steps.update_step import UpdateStep
from openppo.types import Experience, Trajectory


class ExperienceStep:
    """Makes experience in two parts: before and after scores are known. All ranks call every method together.

    Where one optimizer step trains on all samples of a rollout (at once), the forward passes that this step starts with
    give what passes without gradients would give before it: the critic's values and, in bfloat16, the actor's old
    log-probs. Those passes are left out then.
    """

    def __init__(
        self, config: TrainPPOConfig, parts: Parts, buffer: ReplayBuffer, update_step: UpdateStep, timer: PhaseTimer
    ) -> None:
        self.config = config
        self.parts = parts
        self.comm = parts.strategy.comm
        self.maker = parts.maker
        self.buffer = buffer
        self.update_step = update_step
        self.timer = timer
        self.normalizes = self.maker.estimator.normalizes(config.advantage.normalize_advantages)

    def run_models(self, trajectories: Sequence[Trajectory], recompute: bool) -> list[Experience]:
        """What needs no scores; ``recompute`` whatever ``--old_log_probs`` says. ``Interrupted`` as of the maker."""
        at_once = self._at_once(self._count(trajectories))
        source = "recompute" if recompute else self.config.old_log_probs(at_once)
        values = not (at_once and self._critic_goes_first)
        with self.timer.phase("experience"), self.parts.strategy.uncompiled():
            self.parts.train(False)
            return self.maker.run_models(trajectories, source, values)

    def fill(
        self,
        experiences: Sequence[Experience],
        trajectories: Sequence[Trajectory],
        metrics: Metrics,
        sample_log: SampleLog,
    ) -> StepInProgress:
        """Put complete experience into the buffer: of what ``run_models`` made of ``trajectories``, which have scores.

        Errors as of ``UpdateStep.train``.
        """
        step = StepInProgress(metrics, self._count(trajectories), count_tokens(trajectories), samples=[])
        lambd_critic = 1.0 if self.update_step.pretrains_values else None
        if self._at_once(step.n_samples) and self._critic_goes_first:
            self._fill_and_train_critic(experiences, trajectories, step, lambd_critic)
        else:
            with self.timer.phase("experience"):
                self.buffer.extend(self.maker.add_advantages(experiences, trajectories, metrics, lambd_critic))
        with self.timer.phase("experience"):
            if self.normalizes:
                self.buffer.normalize("advantages")
        step.n_samples = self._count(self.buffer.items)
        self.timer.count_tokens("experience", step.n_tokens)
        step.samples = sample_log.describe(trajectories, self.buffer, self.update_step.position.global_step + 1)
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
        if len(self.buffer) > 0:
            measure_experience(join_rows(self.buffer.items).to(self.parts.strategy.device), step.metrics)

    @property
    def _critic_goes_first(self) -> bool:
        """Not where samples are dropped between values and training, nor where training drops parts of adapters."""
        dropped = self.config.shaping.overlong_filter or self.config.ppo.buffer_limit > 0
        exact = not dropped and self.config.lora.lora_dropout == 0
        return self.update_step.critic_step is not None and exact

    def _at_once(self, n_samples: int) -> bool:
        return 0 < n_samples <= self.config.batch.train_batch_size

    def _count(self, samples: Sequence[object]) -> int:
        """Over all ranks."""
        return int(self.comm.all_reduce(torch.tensor(len(samples))))


def count_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Of prompts and responses."""
    return sum(len(trajectory.token_ids) for trajectory in trajectories)
