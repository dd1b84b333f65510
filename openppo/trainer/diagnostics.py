"""What is shown of a step to people: samples, the self-check of the first one, and distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.pretrained import eos_token_ids
from openppo.trainer.components import PPOComponents
from openppo.trainer.sample_log import SampleLog
from openppo.trainer.self_check import check_samples
from openppo.types import Experience, Trajectory


class StepDiagnostics:
    """Shows steps and evaluations; nothing is computed for it but histograms. All ranks call every method together."""

    def __init__(self, config: TrainPPOConfig, components: PPOComponents, total_steps: int) -> None:
        self.config = config
        self.components = components
        self.trained_on: Sequence[Trajectory] | None = None
        """Trajectories of the last step, until it is shown."""
        comm, weights = components.strategy.comm, config.rewards.weights()
        self._samples = SampleLog(comm, components.trackers, components.tokenizer, weights, total_steps)
        self._has_checked = not config.tracking.self_check or comm.rank != 0

    def observe(self, micro: Experience, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Keep what the actor's training forward computed, if the step under way is logged token by token."""
        self._samples.observe(self.components.state.global_step + 1, micro, log_probs, entropy)

    def show_step(self, step: int, buffer: ReplayBuffer, metrics: Mapping[str, float]) -> None:
        """Log what ``step`` has trained on, ``trained_on`` and its experience in ``buffer``; drop both."""
        if self.trained_on is None:  # of an earlier session, which has logged it
            return
        if not self._has_checked and len(buffer) > 0:
            self._has_checked = True
            self._check(step, buffer, metrics.get("kl_coef", 0.0))
        self._samples.write(step, self.trained_on, buffer)
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
        tokenizer, rewards = self.components.tokenizer, self.config.rewards
        eos = eos_token_ids(self.components.actor.module.model, tokenizer)
        # a function may reward single tokens, and so may steps
        one_score = rewards.reward_fn is None and rewards.remote_rm_url is None and rewards.prm_pretrain is None
        check_samples(step, buffer.items, tokenizer, eos, self.config.kl, kl_coef, one_score)
