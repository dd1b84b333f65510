"""Parts of a PPO trainer."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openppo.experience.maker import ExperienceMaker
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.rollout.engine import Engine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.fault_report import ExplainMemory, explain_nothing
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Trackers
from openppo.trainer.cards.run_card import RunCard
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.run_data import RunData
from openppo.trainer.train_state import TrainState
from openppo.types import StopCheck


@dataclass(frozen=True)
class PPOComponents:
    """Models, data and reporting of a PPO trainer.

    ``critic_step`` is None for estimators without a critic, ``ema`` without ``--ema_beta``. If the caller's source
    makes the samples, ``engine`` is None, and there are no tasks. ``pack_documents_to`` is the
    length in tokens of rows that documents share (None: a row for each document).
    """

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainableModel
    critic_step: CriticStep | None
    maker: ExperienceMaker
    replay_buffer: ReplayBuffer
    data: RunData
    trackers: Trackers
    grading: Grading
    checkpointer: Checkpointer
    engine: Engine | None = None
    ema: ParameterAverage | None = None
    pack_documents_to: int | None = None
    stop: StopCheck = field(default_factory=StopCheck)
    explain_memory: ExplainMemory = explain_nothing
    """Compares estimated and measured memory in a fault report."""
    state: TrainState = field(default_factory=TrainState)
    card: RunCard = field(default_factory=RunCard)

    @property
    def critic(self) -> TrainableModel | None:
        """Model that ``critic_step`` trains; None without a critic."""
        return None if self.critic_step is None else self.critic_step.model

    def weights_to_save(self) -> AbstractContextManager[None]:
        """Context in which the actor has the weights to save: the average with ``--ema_beta``."""
        return nullcontext() if self.ema is None else self.ema.swapped_in()

    def write_policy(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder with its card, on all ranks together."""
        with self.weights_to_save():
            self._write(self.actor, folder)

    def write_critic(self, folder: Path) -> None:
        """Write the critic, if there is one, as ``write_policy`` writes the actor."""
        if self.critic is not None:
            self._write(self.critic, folder)

    def _write(self, model: TrainableModel, folder: Path) -> None:
        strategy = self.strategy
        state = self.state
        strategy.save_pretrained(model.module.model, folder, self.tokenizer)
        self.card.write(folder, state.global_step, state.consumed_samples, comm=strategy.comm)
