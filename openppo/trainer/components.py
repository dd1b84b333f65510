"""What a PPO trainer is put together from, and how far it has come."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.experience.maker import ExperienceMaker
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression
from openppo.models.vision_models import placeholders
from openppo.rewards import Scorer
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.vllm_requests import IMAGE_FAMILIES
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Trackers
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.data import PPOData
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.memory.estimate import Estimate
from openppo.trainer.roles import critic_lora, critic_start, loading
from openppo.trainer.startup import policy_vision
from openppo.types import StopCheck


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


def load_actor(config: TrainPPOConfig, reference: bool = False) -> Actor:
    """The policy before training, or the ``reference`` where that is a model of its own."""
    model = config.model
    lora = {} if reference else vars(config.lora)
    flag = "--pretrain"
    name = config.model.pretrain
    if reference and model.ref_pretrain is not None:
        flag, name = "--ref_pretrain", model.ref_pretrain
    with model_error_context(flag, name, "reference" if reference else "actor"):
        return Actor(name, temperature=config.generation.temperature, **loading(config), **lora)


def load_critic(config: TrainPPOConfig) -> ScalarHeadModel:
    """The critic before training."""
    start = critic_start(config)
    assert start is not None, "the estimator has a critic"
    options = {
        "value_head_prefix": config.model.value_head_prefix,
        **loading(config),
        **vars(critic_lora(config)),
    }
    with model_error_context(*start, "critic"):
        return get_llm_for_sequence_regression(start[1], "critic", **options)


def check_run_with_images(
    config: TrainPPOConfig, data: PPOData, actor_config: PreTrainedConfig
) -> None:
    """``ValueError`` for what cannot work where prompts have images."""
    check_images(actor_config, f"--pretrain {config.model.pretrain}")
    if any(
        not placeholders(actor_config).keys().isdisjoint(document.token_ids)
        for document in data.documents
    ):
        raise ValueError(
            "--pretrain_data: a document names the token that stands for an image. Remove it."
        )
    in_vllm = "video" not in data.kinds and actor_config.model_type in IMAGE_FAMILIES
    if config.generation.rollout_engine == "vllm" and not in_vllm:
        what = (
            f"is given no videos, and images with models of type {', '.join(IMAGE_FAMILIES)} only"
        )
        raise ValueError(f"--rollout_engine vllm {what}. Use --rollout_engine hf.")


def has_groups(config: TrainPPOConfig) -> bool:
    """Whether samples may begin alike, and may share that."""
    several = config.ppo.n_samples_per_prompt > 1 or config.agents.form or config.orchestrator.tasks
    return config.ppo.share_prompts == "auto" and bool(several)


def sharing(config: TrainPPOConfig, strategy: DeepspeedStrategy, *models: Any) -> TrainPPOConfig:
    """With ``--share_prompts off``, on all ranks, if one of the models cannot: batches have little padding then."""
    modules = [getattr(model, "module", model) for model in models if model is not None]
    separate = strategy.any_rank(not all(module.shares_prompts for module in modules))
    return config if not separate else replace(config, ppo=replace(config.ppo, share_prompts="off"))
