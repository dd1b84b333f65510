"""Models of a PPO run by role: from where they start, with which adapters, and whether they fit together."""

from dataclasses import replace

from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.experience.estimators import ESTIMATORS
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression


def critic_start(config: TrainPPOConfig) -> tuple[str, str] | None:
    """Flag and name of the model that the critic starts from; None for an estimator without one."""
    if not ESTIMATORS[config.advantage.advantage_estimator].uses_critic:
        return None
    model = config.model
    named = {
        "--critic_pretrain": model.critic_pretrain,
        "--reward_pretrain": config.rewards.reward_pretrain,
    }
    return next(
        ((flag, name) for flag, name in named.items() if name), ("--pretrain", model.pretrain)
    )


def loading(config: TrainPPOConfig) -> dict[str, bool]:
    """How models of the run are loaded."""
    model = config.model
    options = {"flash_attn": model.flash_attn, "trust_remote_code": model.trust_remote_code}
    return options | {"bf16": config.deepspeed.bf16}


def critic_lora(config: TrainPPOConfig) -> LoRAConfig:
    """The critic's adapters, if it has any."""
    rank = (
        config.lora.lora_rank
        if config.model.critic_lora_rank is None
        else config.model.critic_lora_rank
    )
    return replace(config.lora, lora_rank=rank, load_in_4bit=config.lora.load_in_4bit and rank > 0)


def other_models(config: TrainPPOConfig) -> list[tuple[str, str]]:
    """Flag and name of what critic and reference start from, where it is not the actor's model."""
    starts = [
        critic_start(config) or ("--pretrain", ""),
        ("--ref_pretrain", config.model.ref_pretrain),
    ]
    return [(flag, name) for flag, name in starts if flag != "--pretrain" and name is not None]


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
