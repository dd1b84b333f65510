"""Shared beginnings of prompts: whether a run may use them."""

from dataclasses import replace
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.strategy.deepspeed import DeepspeedStrategy


def has_groups(config: TrainPPOConfig) -> bool:
    """True if samples may begin alike, and ``--share_prompts`` allows to share that."""
    if config.ppo.share_prompts != "auto":
        return False
    has_several_samples = config.ppo.n_samples_per_prompt > 1
    return bool(has_several_samples or config.agents.form or config.orchestrator.tasks)


def sharing(config: TrainPPOConfig, strategy: DeepspeedStrategy, *models: Any) -> TrainPPOConfig:
    """Return ``config``, with ``--share_prompts off`` on all ranks if one of the models cannot share.

    Batches then have little padding.
    """
    modules = [getattr(model, "module", model) for model in models if model is not None]
    all_share = all(module.shares_prompts for module in modules)
    if strategy.any_rank(not all_share):
        return replace(config, ppo=replace(config.ppo, share_prompts="off"))
    return config
