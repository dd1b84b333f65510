"""Images in a PPO run: checks, and stand-ins for batches without any."""

from typing import Any

from transformers import PreTrainedConfig

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.models.vision_models import placeholders
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.vllm_requests import IMAGE_FAMILIES
from openppo.trainer.components import PPOComponents
from openppo.trainer.data import RunData
from openppo.trainer.policy_inputs import policy_vision


def check_run_with_images(
    config: TrainPPOConfig, data: RunData, actor_config: PreTrainedConfig
) -> None:
    """Raise ``ValueError`` if the model, the documents or the engine rule out prompts with images."""
    check_images(actor_config, f"--pretrain {config.model.pretrain}")

    reserved_ids = placeholders(actor_config).keys()
    for document in data.documents:
        if not reserved_ids.isdisjoint(document.token_ids):
            raise ValueError(
                "--pretrain_data: a document names the token that stands for an image. Remove it."
            )

    vllm_reads_them = "video" not in data.kinds and actor_config.model_type in IMAGE_FAMILIES
    if config.generation.rollout_engine == "vllm" and not vllm_reads_them:
        families = ", ".join(IMAGE_FAMILIES)
        raise ValueError(
            f"--rollout_engine vllm is given no videos, and images with models of type {families} only. "
            "Use --rollout_engine hf."
        )


def prepare_for_images(
    components: PPOComponents, config: TrainPPOConfig, agents_may_show: bool
) -> RowVision | None:
    """Set the stand-in of batches without images; return the reader of agents' images.

    Both only if prompts have images, or agents may show some. Agents whose run cannot have images get none (None), and
    the log says why. Comes after the checks of models, whose tiny rows may hold placeholders.
    """
    strategy = components.strategy
    data = components.data
    policy: Any = components.actor.module
    model_config = policy.model.config
    vision = policy_vision(config.model, components.tokenizer, model_config, options=config.data)

    may_have_images = bool(data.kinds) or (agents_may_show and vision.reads)
    if components.engine is None or not may_have_images:
        return None

    error = None
    modules: list[Any] = []
    kinds = data.kinds | {"image"} if agents_may_show else data.kinds
    try:
        check_run_with_images(config, data, model_config)
        modules = _modules_with_images(components, components.engine)
        blank = vision.blank(sorted(kinds))
    except ValueError as raised:
        if data.kinds:
            raise
        error = raised

    if strategy.any_rank(error is not None):
        reason = error or "another rank cannot load the processor"
        logger.warning("agents get no images: %s", reason)
        return None

    for module in modules:
        module.stand_in = blank if strategy.comm.world_size > 1 else None
    return vision


def _modules_with_images(components: PPOComponents, engine: Engine) -> list[Any]:
    """Return the modules that get samples with images; raise ``ValueError`` if one cannot read them."""
    if isinstance(engine, HFEngine) and engine.any_rank is not None:
        raise ValueError(
            "--zero_stage 3: weights that are gathered layer by layer while sampling, as these are too large, "
            "read no images. Use --zero_stage 2, or a smaller model."
        )

    models = {
        "actor": components.actor,
        "critic": components.critic,
        "reference": components.maker.reference,
    }
    modules: dict[str, Any] = {
        role: getattr(model, "module", model) for role, model in models.items() if model
    }
    actor_placeholders = placeholders(modules["actor"].model.config)
    for role, module in modules.items():
        if placeholders(module.model.config) != actor_placeholders:
            raise ValueError(
                f"the {role} does not read images as --pretrain does. Use a model of its family."
            )
    return list(modules.values())
