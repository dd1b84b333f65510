"""What is shown of a step before it is trained on."""

from __future__ import annotations

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.pretrained import eos_token_ids
from openppo.trainer.components import PPOComponents
from openppo.trainer.self_check import check_samples


class StepView:
    """The self-check of the first step of a session, and the distributions of every step that is logged."""

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents) -> None:
        self.config = config
        self.components = parts
        self._has_checked = not config.tracking.self_check or parts.strategy.comm.rank != 0

    def before_training(self, step: int, buffer: ReplayBuffer, kl_coef: float) -> None:
        """Look at ``buffer``, without changing it, before step number ``step`` trains on it. All ranks call it."""
        if not self._has_checked and len(buffer) > 0:
            self._has_checked = True
            self._check(step, buffer, kl_coef)
        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            self.components.trackers.log_histograms(
                step, experience_histograms(buffer.items, self.components.strategy.comm)
            )

    def _check(self, step: int, buffer: ReplayBuffer, kl_coef: float) -> None:
        tokenizer = self.components.tokenizer
        eos = eos_token_ids(self.components.actor.module.model, tokenizer)
        source = self.config.rewards  # a function may reward single tokens, and so may steps
        one_score = source.reward_fn is None and source.remote_rm_url is None and source.prm_pretrain is None
        check_samples(step, buffer.items, tokenizer, eos, self.config.kl, kl_coef, one_score)
