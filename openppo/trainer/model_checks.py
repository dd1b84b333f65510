"""Checks of a PPO run's models that need no weights."""

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.config.fields import declared_options, given_options, rules_of
from openppo.models.loading import load_options
from openppo.models.pretrained import check_model
from openppo.models.size import check_cache
from openppo.rewards.build import own_tokenizer
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.vllm_engine import check_vllm
from openppo.strategy.comm import InferenceStrategy, collective
from openppo.trainer.objects import NOTHING, OwnObjects
from openppo.trainer.policy_inputs import load_policy_tokenizer
from openppo.trainer.roles import critic_start, other_models


def check_models(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    samples: bool = True,
    own: OwnObjects = NOTHING,
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Check what needs neither data nor weights; tokenizer and config of the actor, which ``own`` may hold.

    Only a run that ``samples`` needs an engine.
    """
    model = config.model
    estimator = config.advantage.advantage_estimator
    trust = config.model.trust_remote_code
    given, without = given_options(config), f"--advantage_estimator {estimator} has none"
    for name, declared in (
        declared_options(TrainPPOConfig).items() if critic_start(config) is None else ()
    ):
        if rules_of(declared).of_critic and given[name] != declared.default:
            raise ValueError(f"--{name} is about a critic, and {without}: leave it out.")
    actor_config = own.configs.get("--pretrain") or collective(
        strategy.comm, lambda: check_model(model.pretrain, "--pretrain", trust)
    )
    load_options(
        config.deepspeed.bf16, model.flash_attn, config.lora.load_in_4bit
    )  # what they need is installed
    if samples and config.generation.cuda_graphs == "on":
        elsewhere = config.run.dry_run  # which may be about another machine
        choose_recorder("on", actor_config, torch.device("cuda") if elsewhere else strategy.device)
    if samples and config.generation.rollout_engine == "vllm":
        collective(strategy.comm, check_vllm)
    elif samples:
        check_cache(actor_config)
    tokenizer = own.tokenizer or load_policy_tokenizer(model.pretrain, trust, config.data)
    own.check_vocabularies(tokenizer, actor_config)
    others = [(flag, name) for flag, name in other_models(config) if flag not in own.configs]
    if own.actor is not None and _start_from_pretrain(config):
        others.append(("--pretrain", model.pretrain))
    for flag, name in others:
        check_model(name, flag, trust)
        if (
            own_tokenizer(flag, name, actor_config, tokenizer=tokenizer, trust_remote_code=trust)
            is not None
        ):
            role = "a reference" if flag == "--ref_pretrain" else "a critic"
            own_flag = flag != "--reward_pretrain"
            other = (
                "use one of the same family" if own_flag else "name another with --critic_pretrain"
            )
            raise ValueError(
                f"{flag} {name} has another vocabulary than --pretrain {model.pretrain}, and as {role} it would read "
                f"token ids that are not its own: {other}."
            )
    return tokenizer, actor_config


def _start_from_pretrain(config: TrainPPOConfig) -> bool:
    """Whether critic or reference are read from ``--pretrain``."""
    has_reference = (
        config.kl.init_kl_coef > 0
        and config.model.ref_pretrain is None
        and config.lora.lora_rank == 0
    )
    return has_reference or (critic_start(config) or ("", ""))[0] == "--pretrain"
