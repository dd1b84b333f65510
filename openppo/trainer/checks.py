"""What is checked before data and weights are loaded: models, options that depend on them, and their contexts."""

from __future__ import annotations

import logging

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.experience.estimators import ESTIMATORS, check_estimator
from openppo.models.adapters import refuse_stacked_adapters
from openppo.models.loading import load_options
from openppo.models.pretrained import check_model, context_length
from openppo.rewards.build import own_tokenizer
from openppo.rollout.decode_graphs import check_layers
from openppo.rollout.row_cache import check_cache
from openppo.rollout.vllm_engine import check_vllm
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.gpu import check_transformers
from openppo.trainer.data import PPOData
from openppo.trainer.engine_check import LONGEST
from openppo.trainer.startup import check_context, load_policy_tokenizer, on_all_ranks

logger = logging.getLogger("openppo")


def check_models(
    config: TrainPPOConfig, strategy: DeepspeedStrategy
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig, tuple[str, str] | None]:
    """Check what needs neither data nor weights; tokenizer, the actor's config, and what the critic starts from."""
    model = config.model
    _check_algorithm(config)
    actor_config = on_all_ranks(
        strategy.comm, lambda: check_model(model.pretrain, "--pretrain", model.trust_remote_code)
    )
    _check_lora(config)
    load_options(config.deepspeed.bf16, model.flash_attn, config.lora.load_in_4bit)  # what they need is installed
    _check_gpu_options(config, actor_config, strategy)
    _check_engine(config, actor_config, strategy)
    tokenizer = load_policy_tokenizer(model.pretrain, model.trust_remote_code, config.data.chat_template_kwargs)
    critic = critic_start(config) if ESTIMATORS[config.advantage.advantage_estimator].uses_critic else None
    _check_vocabularies(config, tokenizer, critic)
    return tokenizer, actor_config, critic


def _check_algorithm(config: TrainPPOConfig) -> None:
    """Pairs of options of which one depends on the estimator."""
    name = config.advantage.advantage_estimator
    check_estimator(name, config.ppo.n_samples_per_prompt)
    if ESTIMATORS[name].uses_critic:
        return
    for flag, given in (
        ("--freezing_actor_steps", config.ppo.freezing_actor_steps > 0),
        ("--value_pretrain_steps", config.ppo.value_pretrain_steps > 0),
        ("--save_value_network", config.model.save_value_network),
        ("--critic_pretrain", config.model.critic_pretrain is not None),
        ("--critic_lora_rank", config.model.critic_lora_rank is not None),
        ("--lambd_critic", config.advantage.lambd_critic is not None),
        ("--adaptive_lambd_alpha", config.advantage.adaptive_lambd_alpha is not None),
    ):
        if given:
            raise ValueError(f"{flag} is about a critic, and --advantage_estimator {name} has none: leave it out.")


def _check_lora(config: TrainPPOConfig) -> None:
    """Before other models are loaded, which takes long."""
    if config.lora.lora_rank > 0:
        try:
            refuse_stacked_adapters(config.model.pretrain)
        except ValueError as error:
            raise ValueError(f"--pretrain {error}") from error


def _check_engine(config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy) -> None:
    if config.generation.rollout_engine == "vllm":
        on_all_ranks(strategy.comm, check_vllm)
    else:
        check_cache(actor_config)
        check_transformers()


def _check_gpu_options(config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy) -> None:
    here = strategy.device.type == "cuda" or config.run.dry_run  # which may be about another machine
    if config.generation.cuda_graphs:
        if not here:
            raise ValueError("--cuda_graphs records steps on a GPU, and this run is on a CPU: leave it out.")
        check_layers(actor_config)
    if config.ppo.offload_idle and not here and strategy.is_main:
        logger.warning("--offload_idle: there is no GPU whose memory it would save, it only takes time")


def _check_vocabularies(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, critic: tuple[str, str] | None
) -> None:
    """Refuse a critic or reference with another vocabulary than the actor."""
    trust, of_critic = config.model.trust_remote_code, critic or ("", None)
    for flag, name, role in ((*of_critic, "a critic"), ("--ref_pretrain", config.model.ref_pretrain, "a reference")):
        if name is None or flag == "--pretrain":
            continue
        check_model(name, flag, trust)
        if own_tokenizer(flag, name, config.model.pretrain, tokenizer, trust) is not None:
            remedy = (
                "name another with --critic_pretrain" if flag == "--reward_pretrain" else "use one of the same family"
            )
            raise ValueError(
                f"{flag} {name} has another vocabulary than --pretrain {config.model.pretrain}, and as {role} it would "
                f"read token ids that are not its own: {remedy}."
            )


def critic_start(config: TrainPPOConfig) -> tuple[str, str]:
    """Flag and name of the model that the critic starts from."""
    starts = (
        ("--critic_pretrain", config.model.critic_pretrain),
        ("--reward_pretrain", config.rewards.reward_pretrain),
    )
    return next(((flag, name) for flag, name in starts if name), ("--pretrain", config.model.pretrain))


def check_contexts(config: TrainPPOConfig, data: PPOData, critic: tuple[str, str] | None) -> None:
    """Refuse sequences beyond the context of critic or reference."""
    new_tokens = config.generation.generate_max_len
    for flag, name in (critic or ("", None), ("--ref_pretrain", config.model.ref_pretrain)):
        if name is not None and flag != "--pretrain":
            model_config = check_model(name, flag, config.model.trust_remote_code)
            check_context(model_config, f"{flag} {name}", data.longest - new_tokens, new_tokens)


def longest_sequence(config: TrainPPOConfig, actor_config: PreTrainedConfig) -> int:
    """Largest number of tokens of a prompt with its response."""
    wanted = max(config.data.prompt_max_len + config.generation.generate_max_len, LONGEST)
    context = context_length(actor_config)
    return wanted if context is None else min(wanted, context)
