"""Images in a PPO run: the reader for agents, and stand-ins for batches without any."""

from typing import Any

from openppo import logger
from openppo.build.check import Checked
from openppo.build.checks.images import check_run_with_images
from openppo.build.models import Models
from openppo.build.policy_inputs import policy_vision
from openppo.datasets.media import RowVision
from openppo.models.vision_models import placeholders
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.trainer.run_data import RunData


def prepare_for_images(
    checked: Checked, data: RunData, models: Models, engine: Engine
) -> RowVision | None:
    """Set the stand-in of batches without images; return the reader of agents' images.

    Both only if prompts have images, or agents may show some. Agents whose run cannot have images get none (None), and
    the log says why. Comes after the checks of models, whose tiny rows may hold placeholders.
    """
    config = checked.config
    strategy = checked.strategy
    agents_may_show = checked.tasks is not None and checked.tasks.have_agents
    model_config = models.actor.module.model.config
    vision = policy_vision(config.model, checked.tokenizer, model_config, options=config.data)

    may_have_images = bool(data.kinds) or (agents_may_show and vision.reads)
    if not may_have_images:
        return None

    error = None
    modules: list[Any] = []
    kinds = data.kinds | {"image"} if agents_may_show else data.kinds
    try:
        check_run_with_images(config, data, model_config)
        modules = _modules_with_images(models, engine)
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
        module.use_stand_in(blank if strategy.comm.world_size > 1 else None)
    return vision


def _modules_with_images(models: Models, engine: Engine) -> list[Any]:
    """Return the modules that get samples with images; raise ``ValueError`` if one cannot read them."""
    if isinstance(engine, HFEngine) and engine.any_rank is not None:
        raise ValueError(
            "--zero_stage 3: weights that are gathered layer by layer while sampling, as these are too large, "
            "read no images. Use --zero_stage 2, or a smaller model."
        )

    modules: dict[str, Any] = {
        role: getattr(model, "module", model) for role, model in models.by_role.items()
    }
    actor_placeholders = placeholders(modules["actor"].model.config)
    for role, module in modules.items():
        if placeholders(module.model.config) != actor_placeholders:
            raise ValueError(
                f"the {role} does not read images as --pretrain does. Use a model of its family."
            )
    return list(modules.values())
