"""What a PPO trainer is put together from, and how far it has come."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.datasets.media import RowVision
from openppo.experience.maker import ExperienceMaker
from openppo.media import placeholders
from openppo.rewards import Scorer
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Trackers
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.data import PPOData
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.images import check_run_with_images
from openppo.trainer.memory.estimate import Estimate
from openppo.trainer.policy_inputs import policy_vision
from openppo.trainer.train_state import TrainState
from openppo.types import StopCheck


@dataclass
class PPOComponents:
    """What a PPO trainer works with: models, data and places to report to.

    ``critic_step`` is None for estimators without a critic, ``ema`` without ``--enable_ema``. ``engine`` and ``scorer``
    are None, and there are no prompts, where a source of the caller's makes trajectories. ``pack_documents_to`` is the
    length of rows that documents share (None: a row for each).
    """

    strategy: DeepspeedStrategy
    tokenizer: PreTrainedTokenizerBase
    actor: TrainableModel
    critic_step: CriticStep | None
    maker: ExperienceMaker
    data: PPOData
    trackers: Trackers
    grading: Grading
    checkpointer: Checkpointer
    engine: Engine | None = None
    scorer: Scorer | None = None
    ema: ParameterAverage | None = None
    pack_documents_to: int | None = None
    stop: StopCheck = field(default_factory=StopCheck)
    estimate: Estimate | None = None
    state: TrainState = field(default_factory=TrainState)

    @property
    def critic(self) -> TrainableModel | None:
        """The model that ``critic_step`` trains."""
        return None if self.critic_step is None else self.critic_step.model

    def prepare_for_images(self, config: TrainPPOConfig, of_agents: bool) -> RowVision | None:
        """Where prompts have images, read one where a batch has none.

        After the checks of models, whose tiny rows may hold such tokens. Returns what reads the images ``of_agents``:
        None, and the log says why, where those of prompts are none and the run could not have any.
        """
        policy: Any = self.actor.module
        vision = policy_vision(
            config.model, self.tokenizer, policy.model.config, options=config.data
        )
        if self.engine is None or not (self.data.kinds or (of_agents and vision.reads)):
            return None
        error, modules = None, list[Any]()
        try:
            check_run_with_images(config, self.data, policy.model.config)
            modules = self._reading_images(self.engine)
            blank = vision.blank(sorted(self.data.kinds | ({"image"} if of_agents else set())))
        except ValueError as raised:
            if self.data.kinds:
                raise
            error = raised
        if self.strategy.any_rank(error is not None):
            logger.warning(
                "agents get no images: %s", error or "another rank cannot load the processor"
            )
            return None
        for module in modules:
            module.stand_in = blank if self.strategy.comm.world_size > 1 else None
        return vision

    def _reading_images(self, engine: Engine) -> list[Any]:
        """Modules that get samples with images; ``ValueError`` for one that cannot read them."""
        if isinstance(engine, HFEngine) and engine.any_rank is not None:
            what = "weights that are gathered layer by layer while sampling, as these are too large, read no images"
            raise ValueError(f"--zero_stage 3: {what}. Use --zero_stage 2, or a smaller model.")
        named = {"actor": self.actor, "critic": self.critic, "reference": self.maker.reference}
        modules: dict[str, Any] = {
            role: getattr(model, "module", model) for role, model in named.items() if model
        }
        for role, module in modules.items():
            if placeholders(module.model.config) != placeholders(modules["actor"].model.config):
                raise ValueError(
                    f"the {role} does not read images as --pretrain does. Use a model of its family."
                )
        return [*modules.values()]

    def weights_to_save(self) -> AbstractContextManager[None]:
        """Inside, the actor has the weights that are saved: the average with ``--enable_ema``."""
        return nullcontext() if self.ema is None else self.ema.swapped_in()

    def write_policy(self, folder: Path) -> None:
        """Write the actor as a Hugging Face folder, on all ranks together."""
        with self.weights_to_save():
            self.strategy.save_pretrained(self.actor.module.model, folder, self.tokenizer)
