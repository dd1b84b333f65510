"""Values that options leave open, as a run decides them once."""

from __future__ import annotations

from dataclasses import dataclass

from openppo.config.train_ppo import TrainPPOConfig


@dataclass(frozen=True)
class Resolved:
    """Sizes and layout of batches, which follow from options, memory and models.

    The tokens bound micro-batches in training and in forwards without training; None bounds them by rows alone. With
    ``shares_prompts`` rows that begin alike hold their beginning once, which all models of the run must be able to
    read.
    """

    micro_train_tokens: int | None
    micro_rollout_tokens: int | None
    shares_prompts: bool

    @classmethod
    def of(cls, config: TrainPPOConfig) -> Resolved:
        """Take the options as they are written."""
        return cls(
            micro_train_tokens=config.ppo.micro_train_tokens,
            micro_rollout_tokens=config.ppo.micro_rollout_tokens,
            shares_prompts=config.ppo.share_prompts == "auto",
        )

    @property
    def options(self) -> dict[str, int | None]:
        """The sizes by the option that would state them, for records of the run."""
        return {
            "micro_rollout_tokens": self.micro_rollout_tokens,
            "micro_train_tokens": self.micro_train_tokens,
        }
