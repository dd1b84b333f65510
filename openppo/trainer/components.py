"""What a PPO trainer is put together from, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.datasets import TokenExample
from openppo.experience.maker import ExperienceMaker
from openppo.rewards import Scorer
from openppo.rollout.engine import Engine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics, Trackers
from openppo.trainer.evaluation import Evaluator
from openppo.trainer.memory import Estimate
from openppo.trainer.resume.checkpointer import Checkpointer
from openppo.types import NeverStops, Prompt, StopCheck


@dataclass
class PPOComponents:
    """What a PPO trainer works with: engines, scorer, data and places to report to.

    ``critic`` is None for estimators without one, ``ema`` without ``--enable_ema``, ``evaluator`` without
    ``--eval_data``. ``pack_documents_to`` is the length of rows that documents share (None: a row for each). Without
    ``checkpointer`` there are no checkpoints. ``estimate`` is of the memory that all of it takes.
    """

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainableModel
    critic: TrainableModel | None
    engine: Engine
    scorer: Scorer
    maker: ExperienceMaker
    prompts: list[Prompt]
    documents: list[TokenExample]
    trackers: Trackers
    ema: ParameterAverage | None = None
    evaluator: Evaluator | None = None
    pack_documents_to: int | None = None
    checkpointer: Checkpointer | None = None
    stop: StopCheck = field(default_factory=NeverStops)
    estimate: Estimate | None = None

    def train(self, mode: bool = True) -> None:
        """Switch actor and critic between training and evaluation mode."""
        for engine in (self.actor, self.critic):
            if engine is not None:
                engine.train(mode)


@dataclass
class TrainState:
    """How far a run has come; what the order of data and the random numbers of samples follow from."""

    has_begun: bool = False
    """The evaluation before training, if any, is done."""
    global_step: int = 0
    consumed_samples: int = 0
    """Prompts sampled so far."""
    consumed_batches: int = 0
    """Batches of prompts, of ``PPOTrainer.total_steps``."""
    ended_episodes: int = 0
    policy_version: int = 0
    """Optimizer steps of the actor, skipped ones included."""
    document_batches: int = 0


@dataclass
class StepInProgress:
    """A global step whose experience is made and on which training goes on."""

    metrics: Metrics
    n_samples: int
    """Over all ranks."""
    n_tokens: int
    """Of this rank's trajectories."""
    samples: list[dict[str, Any]]
    """What is logged of them."""
    optimizer_steps: int = 0
    """Mini-batches that are done."""
    actor_done: bool = False
    """In the next mini-batch."""
    critic_done: bool = False
    """Likewise."""
