"""Progress of a PPO run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class TrainState:
    """Counters of a run so far, over all ranks."""

    has_begun: bool = False
    """The evaluation before training, if any, is done."""
    global_step: int = 0
    """Global steps done, which is the policy's version."""
    consumed_samples: int = 0
    """Samples that were trained on."""
    consumed_tokens: int = 0
    """Tokens of these samples."""
    ended_episodes: int = 0
    """Complete passes over the prompts, as of the last complete report."""
    document_batches: int = 0
    """Batches of ``--pretrain_data`` that were trained on."""
    unreported: dict[str, float] | None = None
    """Metrics of the last step until its report is complete."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume at the counters of a checkpoint."""
        vars(self).update(saved)

    def begin(self) -> None:
        """Note that the evaluation before training is done."""
        self.has_begun = True

    def count_step(self, n_samples: int, n_tokens: int) -> None:
        """Count a global step that has trained on samples of so many tokens, over all ranks."""
        self.global_step += 1
        self.consumed_samples += n_samples
        self.consumed_tokens += n_tokens

    def count_documents(self) -> None:
        """Count a batch of ``--pretrain_data``."""
        self.document_batches += 1

    def ends_episode(self, metrics: Mapping[str, float]) -> bool:
        """True if the step of ``metrics`` is the first after another pass over the prompts."""
        return int(metrics["episode"]) > self.ended_episodes

    def begin_report(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of the last step, which a checkpoint saves until they are reported."""
        self.unreported = dict(metrics)

    def end_report(self, metrics: Mapping[str, float]) -> None:
        """Note that the last step is reported."""
        self.ended_episodes = int(metrics["episode"])
        self.unreported = None
