"""What a PPO trainer is put together from, and how far it has come."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from openppo.datasets import TokenExample
from openppo.experience.maker import ExperienceMaker
from openppo.rewards import Scorer
from openppo.rollout.engine import Engine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Trackers
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.critic_step import CriticUpdate
from openppo.trainer.evaluation import Grading
from openppo.trainer.memory import Estimate
from openppo.types import NeverStops, Prompt, RolloutSource, StopCheck, Trajectory


@runtime_checkable
class PromptRollouts(RolloutSource, Protocol):
    """A source that also samples responses to prompts of the caller's."""

    def rollout(self, prompts: Sequence[str | Prompt]) -> list[Trajectory]:
        """Sample and score responses to this rank's share of ``prompts``."""
        ...

    def prompt_batches(self) -> Iterator[list[Prompt]]:
        """Batches of the source's own prompts, in the order of training."""
        ...


@dataclass
class TrainState:
    """How far a run has come."""

    has_begun: bool = False
    """The evaluation before training, if any, is done."""
    global_step: int = 0
    """Global steps done."""
    ended_episodes: int = 0
    policy_version: int = 0
    """Optimizer steps of the actor, skipped ones included."""
    document_batches: int = 0
    """Batches of --pretrain_data trained on."""
    unreported: dict[str, float] | None = None
    """Metrics of the last step while its report, which may evaluate, is not complete."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier session."""
        vars(self).update(state)


@dataclass
class PPOComponents:
    """What a PPO trainer works with: models, data and places to report to.

    ``critic`` is None for estimators without one, ``ema`` without ``--enable_ema``. ``engine`` and ``scorer`` are None,
    and ``prompts`` empty, where a source of the caller's makes trajectories. ``pack_documents_to`` is the length of
    rows that documents share (None: a row for each). Without ``checkpointer`` there are no checkpoints.
    """

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainableModel
    critic: TrainableModel | None
    maker: ExperienceMaker
    documents: list[TokenExample]
    trackers: Trackers
    grading: Grading
    engine: Engine | None = None
    scorer: Scorer | None = None
    prompts: list[Prompt] = field(default_factory=list)
    held_out: list[Prompt] = field(default_factory=list)
    ema: ParameterAverage | None = None
    critic_update: CriticUpdate | None = None
    """Replaces the plain optimizer steps of the critic."""
    pack_documents_to: int | None = None
    checkpointer: Checkpointer | None = None
    stop: StopCheck = field(default_factory=NeverStops)
    estimate: Estimate | None = None
    state: TrainState = field(default_factory=TrainState)

    def weights_to_save(self) -> AbstractContextManager[None]:
        """Inside, the actor has the weights that are saved: the average with ``--enable_ema``."""
        return nullcontext() if self.ema is None else self.ema.swapped_in()

    def write_policy(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder, on all ranks together."""
        with self.weights_to_save():
            self.strategy.save_pretrained(self.actor.module.model, folder, self.tokenizer)

    def write_critic(self, folder: Path) -> None:
        """Write the critic likewise, if there is one."""
        if self.critic is not None:
            self.strategy.save_pretrained(self.critic.module.model, folder, self.tokenizer)
