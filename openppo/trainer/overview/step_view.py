"""What is shown of a step before it is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.pretrained import eos_token_ids
from openppo.trainer.components import PPOComponents
from openppo.trainer.self_check import check_samples
from openppo.trainer.steps.sample_log import SampleLog
from openppo.types import Trajectory


class StepView:
    """Samples of each step, the self-check of the first one of a session, and distributions. Collective."""

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents, total_steps: int) -> None:
        self.config = config
        self.components = parts
        self.trained_on: Sequence[Trajectory] | None = None
        """Trajectories of the last step, until it is shown."""
        self._samples = SampleLog(config, parts, total_steps)
        self._has_checked = not config.tracking.self_check or parts.strategy.comm.rank != 0

    def show_step(self, step: int, buffer: ReplayBuffer, metrics: Mapping[str, float]) -> None:
        """Log what step number ``step`` has trained on, ``trained_on`` and its experience in ``buffer``; drop both."""
        if self.trained_on is None:  # of an earlier session, which has logged it
            return
        if not self._has_checked and len(buffer) > 0:
            self._has_checked = True
            self._check(step, buffer, metrics.get("kl_coef", 0.0))
        self._samples.write(step, self._samples.describe(self.trained_on, buffer, step))
        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            self.components.trackers.log_histograms(
                step, experience_histograms(buffer.items, self.components.strategy.comm)
            )
        buffer.clear()
        self.trained_on = None

    def show_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation."""
        self._samples.write_evaluation(step, trajectories)

    def _check(self, step: int, buffer: ReplayBuffer, kl_coef: float) -> None:
        tokenizer = self.components.tokenizer
        eos = eos_token_ids(self.components.actor.module.model, tokenizer)
        source = self.config.rewards  # a function may reward single tokens, and so may steps
        one_score = source.reward_fn is None and source.remote_rm_url is None and source.prm_pretrain is None
        check_samples(step, buffer.items, tokenizer, eos, self.config.kl, kl_coef, one_score)
