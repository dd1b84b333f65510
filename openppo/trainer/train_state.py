"""Progress of a PPO run."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """How far a run has come."""

    has_begun: bool = False  # the evaluation before training, if any, is done
    global_step: int = 0  # global steps done, which is the policy's version
    consumed_samples: int = 0  # trained on so far, over all ranks, and their tokens
    consumed_tokens: int = 0
    ended_episodes: int = 0
    document_batches: int = 0  # batches of --pretrain_data trained on
    unreported: dict[str, float] | None = (
        None  # metrics of the last step while its report is not complete
    )
