"""Checks of a PPO run's models that need neither data nor weights."""

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.adapters import check_adapters
from openppo.build.checks.teacher import check_teacher
from openppo.build.objects import NOTHING, OwnObjects
from openppo.build.policy_inputs import load_policy_tokenizer
from openppo.build.roles import critic_start, other_models
from openppo.config import TrainPPOConfig
from openppo.config.fields import declared_options, given_options, rules_of
from openppo.models.loading import load_options
from openppo.models.pretrained import check_model
from openppo.models.size import check_cache
from openppo.rewards.build import own_tokenizer
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.vllm_engine import check_vllm
from openppo.strategy.comm import InferenceStrategy, collective


def check_models(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    samples: bool = True,
    objects: OwnObjects = NOTHING,
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Check models and engine before data and weights; return tokenizer and config of the actor.

    ``objects`` may hold both. Only a run that ``samples`` needs an engine.
    """
    name = config.model.pretrain
    trust = config.model.trust_remote_code
    _check_critic_options(config)

    actor_config = objects.configs.get("--pretrain") or collective(
        strategy.comm, lambda: check_model(name, "--pretrain", trust)
    )
    # Raises if a library that these options need is not installed.
    load_options(config.deepspeed.bf16, config.model.flash_attn, config.lora.load_in_4bit)
    check_adapters(
        config.lora,
        strategy.comm,
        "CAUSAL_LM",
        pretrain=name,
        config=actor_config,
        trust_remote_code=trust,
    )
    if samples:
        _check_engine(config, strategy, actor_config)

    tokenizer = objects.tokenizer or load_policy_tokenizer(name, trust, config.data)
    objects.check_vocabularies(tokenizer, actor_config)
    _check_vocabularies_of_others(config, objects, actor_config, tokenizer=tokenizer)
    if config.rewards.are_none and "--ref_pretrain" not in objects.configs:
        check_teacher(config, tokenizer, actor_config, is_main=strategy.comm.rank == 0)
    return tokenizer, actor_config


def _check_critic_options(config: TrainPPOConfig) -> None:
    """Raise ``ValueError`` for an option of the critic where there is none."""
    if critic_start(config) is not None:
        return
    estimator = config.advantage.advantage_estimator
    values = given_options(config)
    for name, declared in declared_options(TrainPPOConfig).items():
        if rules_of(declared).of_critic and values[name] != declared.default:
            raise ValueError(
                f"--{name} is about a critic, and --advantage_estimator {estimator} has none: leave it out."
            )


def _check_engine(
    config: TrainPPOConfig, strategy: InferenceStrategy, actor_config: PreTrainedConfig
) -> None:
    """Raise ``ValueError`` if the engine of the options cannot sample from such a model."""
    if config.generation.cuda_graphs == "on":
        # A dry run may be about another machine.
        device = torch.device("cuda") if config.run.dry_run else strategy.device
        choose_recorder("on", actor_config, device)
    if config.generation.rollout_engine == "vllm":
        collective(strategy.comm, check_vllm)
    else:
        check_cache(actor_config)


def _check_vocabularies_of_others(
    config: TrainPPOConfig,
    objects: OwnObjects,
    actor_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise ``ValueError`` if a critic or reference named by options has another vocabulary."""
    pretrain = config.model.pretrain
    trust = config.model.trust_remote_code

    others = [(flag, name) for flag, name in other_models(config) if flag not in objects.configs]
    if objects.actor is not None and _start_from_pretrain(config):
        others.append(("--pretrain", pretrain))

    for flag, name in others:
        check_model(name, flag, trust)
        other_tokenizer = own_tokenizer(
            flag, name, actor_config, tokenizer=tokenizer, trust_remote_code=trust
        )
        if other_tokenizer is None:
            continue

        role = "a reference" if flag == "--ref_pretrain" else "a critic"
        remedy = "use one of the same family"
        if flag == "--reward_pretrain":
            remedy = "name another with --critic_pretrain"
        raise ValueError(
            f"{flag} {name} has another vocabulary than --pretrain {pretrain}, and as {role} it would read "
            f"token ids that are not its own: {remedy}."
        )


def _start_from_pretrain(config: TrainPPOConfig) -> bool:
    """True if critic or reference are read from ``--pretrain``."""
    start = critic_start(config)
    if start is not None and start[0] == "--pretrain":
        return True
    shares_weights = config.lora.lora_rank > 0
    return config.kl.init_kl_coef > 0 and config.model.ref_pretrain is None and not shares_weights
