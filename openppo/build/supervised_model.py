"""Model of a supervised command before training."""

from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPRMConfig, TrainRMConfig
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.scalar_head import ProcessRewardModel, get_llm_for_sequence_regression


def load_model(config: Any, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Load the model of a supervised command before training."""
    name = config.supervised.pretrain
    with model_error_context("--pretrain", name):
        if isinstance(config, TrainRMConfig):
            return _load_reward_model(config, tokenizer)
        actor = Actor(name, **_loading(config))
        return ProcessRewardModel(actor.model) if isinstance(config, TrainPRMConfig) else actor


def _load_reward_model(config: TrainRMConfig, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """Load a reward model with a new value head."""
    model = get_llm_for_sequence_regression(
        config.supervised.pretrain,
        "reward",
        value_head_prefix=config.data.value_head_prefix,
        init_value_head=True,
        **_loading(config),
    )
    # Plain transformers finds the score of a row through this id.
    model.model.config.pad_token_id = tokenizer.pad_token_id
    return model


def _loading(config: Any) -> dict[str, Any]:
    """Options with which the model is loaded, and its adapters."""
    return {
        "bf16": config.deepspeed.bf16,
        "flash_attn": config.supervised.flash_attn,
        "trust_remote_code": config.supervised.trust_remote_code,
        **vars(config.lora),
    }
