"""Models of a PPO run by role: start, adapters, and loading by name."""

from dataclasses import replace

from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.experience.own_estimator import estimator_of
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression


def critic_start(config: TrainPPOConfig) -> tuple[str, str] | None:
    """Flag and name of the model that the critic starts from; None without a critic."""
    if not estimator_of(config.advantage).uses_critic:
        return None
    if config.model.critic_pretrain:
        return "--critic_pretrain", config.model.critic_pretrain
    if config.rewards.reward_pretrain:
        return "--reward_pretrain", config.rewards.reward_pretrain
    return "--pretrain", config.model.pretrain


def other_models(config: TrainPPOConfig) -> list[tuple[str, str]]:
    """Flag and name of each model, other than the actor's, that critic and reference start from."""
    others = []
    start = critic_start(config)
    if start is not None and start[0] != "--pretrain":
        others.append(start)
    if config.model.ref_pretrain is not None:
        others.append(("--ref_pretrain", config.model.ref_pretrain))
    return others


def critic_lora(config: TrainPPOConfig) -> LoRAConfig:
    """Adapters of the critic, which are new with ``--lora_path`` too; rank 0 is none."""
    rank = config.model.critic_lora_rank
    if rank is None:
        rank = config.lora.lora_rank
    in_4bit = config.lora.load_in_4bit and rank > 0
    return replace(config.lora, lora_rank=rank, load_in_4bit=in_4bit, lora_path=None)


def loading(config: TrainPPOConfig) -> dict[str, bool]:
    """Options with which all models of the run are loaded."""
    return {
        "flash_attn": config.model.flash_attn,
        "trust_remote_code": config.model.trust_remote_code,
        "bf16": config.deepspeed.bf16,
    }


def load_actor(config: TrainPPOConfig, reference: bool = False) -> Actor:
    """Load the policy before training, or a ``reference`` with weights of its own."""
    role = "reference" if reference else "actor"
    flag = "--pretrain"
    name = config.model.pretrain
    if reference and config.model.ref_pretrain is not None:
        flag = "--ref_pretrain"
        name = config.model.ref_pretrain

    lora = {} if reference else vars(config.lora)
    with model_error_context(flag, name, role):
        return Actor(name, temperature=config.generation.temperature, **loading(config), **lora)


def load_critic(config: TrainPPOConfig) -> ScalarHeadModel:
    """Load the critic before training."""
    start = critic_start(config)
    assert start is not None, "the estimator has a critic"
    flag, name = start
    adapters = vars(critic_lora(config))
    prefix = config.model.value_head_prefix
    with model_error_context(flag, name, "critic"):
        return get_llm_for_sequence_regression(
            name, "critic", value_head_prefix=prefix, **loading(config), **adapters
        )
