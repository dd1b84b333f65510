"""Shared beginnings of prompts: whether a run may use them."""

from dataclasses import replace
from typing import Any

from openppo.config import TrainPPOConfig
from openppo.strategy.deepspeed import DeepspeedStrategy


def has_groups(config: TrainPPOConfig) -> bool:
    """Whether samples may begin alike, and may share that."""
    several = config.ppo.n_samples_per_prompt > 1 or config.agents.form or config.orchestrator.tasks
    return config.ppo.share_prompts == "auto" and bool(several)


def sharing(config: TrainPPOConfig, strategy: DeepspeedStrategy, *models: Any) -> TrainPPOConfig:
    """With ``--share_prompts off``, on all ranks, if one of the models cannot: batches have little padding then."""
    modules = [getattr(model, "module", model) for model in models if model is not None]
    separate = strategy.any_rank(not all(module.shares_prompts for module in modules))
    return config if not separate else replace(config, ppo=replace(config.ppo, share_prompts="off"))
