"""From options to trainers: check everything cheap first, then load, wrap and put together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig, TrainRMConfig, TrainSFTConfig, flat_dict
from openppo.datasets import (
    BatchSampler,
    TokenExample,
    load_documents,
    load_preferences,
    load_prompts,
    load_rows,
    load_sft_examples,
)
from openppo.experience.maker import ExperienceMaker
from openppo.models.actor import Actor
from openppo.models.loading import attention_implementation, check_model, eos_token_ids, load_tokenizer, pad_token_id
from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.rewards import FunctionScorer, ModelScorer, Scorer, load_reward_function
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.tracking import Trackers, make_trackers, save_config
from openppo.trainer.ppo_trainer import HEADLINE, Parts, PPOTrainer
from openppo.trainer.reward_model import RM_HEADLINE, RewardModelTrainer
from openppo.trainer.sft import SFT_HEADLINE, SFTTrainer
from openppo.trainer.supervised import SupervisedParts, total_optimizer_steps
from openppo.types import Prompt

logger = logging.getLogger("openppo")


def build_ppo_trainer(config: TrainPPOConfig, strategy: DeepspeedStrategy | None = None) -> PPOTrainer:
    """A trainer ready for ``fit()`` or ``step()``. ``ValueError`` names the flag of whatever cannot work."""
    strategy = strategy or DeepspeedStrategy(config.deepspeed)
    config.validate(strategy.comm.world_size)
    model = config.model
    actor_config = check_model(model.pretrain, "--pretrain")
    attention_implementation(model.flash_attn)
    tokenizer = load_tokenizer(model.pretrain, "--pretrain")
    _check_reward(config, actor_config, tokenizer)
    prompts, documents = _load_ppo_data(config, tokenizer, actor_config)
    scorer = _scorer(config, strategy, tokenizer)  # before the large models: a missing head shows at once

    options = {"bf16": config.deepspeed.bf16, "flash_attn": model.flash_attn}
    critic_name = model.critic_pretrain or model.reward_pretrain or model.pretrain
    check_model(critic_name, "--critic_pretrain")
    critic = get_llm_for_sequence_regression(
        critic_name, "critic", value_head_prefix=model.value_head_prefix, **options
    )
    actor = Actor(model.pretrain, temperature=config.generation.temperature, **options)
    reference = None
    if config.ppo.init_kl_coef > 0:
        reference = strategy.prepare_frozen(
            Actor(model.pretrain, temperature=config.generation.temperature, **options)
        )
    n_steps = _optimizer_steps(config, len(prompts))
    rates = config.learning_rate
    actor_engine = strategy.prepare(actor, config.adam, rates.actor_learning_rate, n_steps)
    critic_engine = strategy.prepare(critic, config.adam, rates.critic_learning_rate, n_steps)
    strategy.seed_per_rank()

    pad = pad_token_id(tokenizer)
    maker = ExperienceMaker(actor_engine, critic_engine, reference, config.ppo, strategy.comm, strategy.device, pad)
    engine = HFEngine(
        actor.model,
        eos_token_ids(actor.model, tokenizer),
        pad,
        config.ppo.micro_rollout_batch_size,
        show_progress=strategy.is_main,
    )
    trackers = _trackers(config, strategy, HEADLINE, config.ppo.num_episodes * _rollouts(config, len(prompts)))
    parts = Parts(
        strategy, tokenizer, actor_engine, critic_engine, engine, scorer, maker, prompts, documents, trackers
    )
    return PPOTrainer(config, parts)


def build_sft_trainer(config: TrainSFTConfig) -> SFTTrainer:
    """A supervised trainer of a causal language model, ready for ``fit()``."""
    strategy = DeepspeedStrategy(config.deepspeed)
    config.validate(strategy.comm.world_size)
    options = config.supervised
    check_model(options.pretrain, "--pretrain")
    attention_implementation(options.flash_attn)
    tokenizer = load_tokenizer(options.pretrain, "--pretrain")

    def load(source: str, flag: str, split: str) -> list:
        rows = load_rows(source, flag=flag, split=split, max_samples=options.max_samples)
        examples, dropped = load_sft_examples(rows, tokenizer, options, config.data)
        return _kept(examples, dropped, flag)

    train, held_out = _train_and_eval(config, load)
    actor = Actor(options.pretrain, bf16=config.deepspeed.bf16, flash_attn=options.flash_attn)
    engine = strategy.prepare(
        actor, config.adam, options.learning_rate, total_optimizer_steps(config, len(train))
    )
    trackers = _trackers(config, strategy, SFT_HEADLINE, total_optimizer_steps(config, len(train)))
    return SFTTrainer(config, SupervisedParts(strategy, tokenizer, engine, train, held_out, trackers))


def build_rm_trainer(config: TrainRMConfig) -> RewardModelTrainer:
    """A trainer of a reward model on preference pairs, ready for ``fit()``."""
    strategy = DeepspeedStrategy(config.deepspeed)
    config.validate(strategy.comm.world_size)
    options = config.supervised
    check_model(options.pretrain, "--pretrain")
    attention_implementation(options.flash_attn)
    tokenizer = load_tokenizer(options.pretrain, "--pretrain")

    def load(source: str, flag: str, split: str) -> list:
        rows = load_rows(source, flag=flag, split=split, max_samples=options.max_samples)
        examples, dropped = load_preferences(rows, tokenizer, options, config.data)
        return _kept(examples, dropped, flag)

    train, held_out = _train_and_eval(config, load)
    model = get_llm_for_sequence_regression(
        options.pretrain,
        "reward",
        bf16=config.deepspeed.bf16,
        flash_attn=options.flash_attn,
        value_head_prefix=config.data.value_head_prefix,
        init_value_head=True,
    )
    model.model.config.pad_token_id = tokenizer.pad_token_id  # plain transformers reads the score through it
    engine = strategy.prepare(
        model, config.adam, options.learning_rate, total_optimizer_steps(config, len(train))
    )
    trackers = _trackers(config, strategy, RM_HEADLINE, total_optimizer_steps(config, len(train)))
    return RewardModelTrainer(config, SupervisedParts(strategy, tokenizer, engine, train, held_out, trackers))
