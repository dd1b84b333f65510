"""Progress of a PPO run."""

from dataclasses import dataclass


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
    """Complete passes over the prompts."""
    document_batches: int = 0
    """Batches of ``--pretrain_data`` that were trained on."""
    unreported: dict[str, float] | None = None
    """Metrics of the last step until its report is complete."""
