"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets import BatchSampler, TokenExample, load_documents, load_prompts, load_rows, require_column
from openppo.experience.maker import ExperienceMaker
from openppo.models.actor import Actor
from openppo.models.loading import attention_implementation, check_model, eos_token_ids, load_tokenizer, pad_token_id
from openppo.models.scalar_head import get_llm_for_sequence_regression
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.rewards import FunctionScorer, ModelScorer, Scorer, load_reward_function
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.engine import TrainingEngine
from openppo.trainer.ppo_trainer import HEADLINE, Parts, PPOTrainer
from openppo.trainer.startup import log_dropped, naming_model, start_trackers
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
    _check_tokens(config, actor_config, tokenizer)
    prompts, documents = _load_data(config, tokenizer, actor_config)
    scorer = _scorer(config, strategy, tokenizer)  # before the large models: a missing head shows at once
    actor, critic, reference = _prepare_models(config, strategy, n_prompts=len(prompts))
    strategy.seed_per_rank()

    comm, pad = strategy.comm, pad_token_id(tokenizer)
    policy: Any = actor.module.model
    maker = ExperienceMaker(actor, critic, reference, config.ppo, comm, strategy.device, pad)
    engine = HFEngine(
        policy,
        eos_token_ids(policy, tokenizer),
        pad,
        config.ppo.micro_rollout_batch_size,
        any_rank_busy=None if strategy.fits_gathered(actor) else strategy.any_rank,
        show_progress=strategy.is_main,
    )
    sampler = BatchSampler(len(prompts), config.ppo.rollout_batch_size, config.deepspeed.seed)
    trackers = start_trackers(config, strategy, HEADLINE, config.ppo.num_episodes * len(sampler))
    return PPOTrainer(
        config, Parts(strategy, tokenizer, actor, critic, engine, scorer, maker, prompts, documents, trackers)
    )


def _prepare_models(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, n_prompts: int
) -> tuple[TrainingEngine, TrainingEngine, nn.Module | None]:
    """Actor, critic and reference (None without a KL penalty), each loaded and wrapped before the next is loaded."""
    model, rates, adam, n_steps = config.model, config.learning_rate, config.adam, _optimizer_steps(config, n_prompts)
    options: dict[str, Any] = {"bf16": config.deepspeed.bf16, "flash_attn": model.flash_attn}
    starts = {"--critic_pretrain": model.critic_pretrain, "--reward_pretrain": model.reward_pretrain}
    flag, critic_name = next(((f, name) for f, name in starts.items() if name), ("--pretrain", model.pretrain))
    with naming_model(flag, critic_name):
        critic = get_llm_for_sequence_regression(
            critic_name, "critic", value_head_prefix=model.value_head_prefix, **options
        )
    critic_engine = strategy.prepare(critic, adam, rates.critic_learning_rate, n_steps)
    with naming_model("--pretrain", model.pretrain):
        actor = Actor(model.pretrain, temperature=config.generation.temperature, **options)
    actor_engine = strategy.prepare(actor, adam, rates.actor_learning_rate, n_steps)
    reference = None
    if config.ppo.init_kl_coef > 0:
        frozen = Actor(model.pretrain, temperature=config.generation.temperature, **options)
        reference = strategy.prepare_frozen(frozen)
    return actor_engine, critic_engine, reference


def _optimizer_steps(config: TrainPPOConfig, n_prompts: int) -> int:
    """Optimizer steps of a whole run, the smaller last rollout of each episode included."""
    ppo, batch = config.ppo, config.batch
    full, rest = divmod(n_prompts, ppo.rollout_batch_size)
    sizes = [ppo.rollout_batch_size] * full + [rest]
    per_pass = sum(math.ceil(size * ppo.n_samples_per_prompt / batch.train_batch_size) for size in sizes)
    return ppo.num_episodes * batch.max_epochs * per_pass


def _load_data(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig
) -> tuple[list[Prompt], list[TokenExample]]:
    """Prompts, and documents for the PTX loss (none without ``--pretrain_data``)."""
    data, new_tokens = config.data, config.generation.generate_max_len
    rows = load_rows(data.prompt_data, flag="--prompt_data", split=data.prompt_split, max_samples=data.max_samples)
    loaded = load_prompts(rows, tokenizer, data)
    log_dropped(loaded.dropped, len(loaded.prompts), "--prompt_data", "--prompt_max_len")
    longest = max(len(prompt.token_ids) for prompt in loaded.prompts)
    context = getattr(actor_config.get_text_config(), "max_position_embeddings", None)  # absent for some models
    if context is not None and longest + new_tokens > context:
        raise ValueError(
            f"The longest prompt has {longest} tokens; with --generate_max_len {new_tokens} that exceeds the context "
            f"of {context} tokens of --pretrain {config.model.pretrain}. Lower --generate_max_len or --prompt_max_len."
        )
    if data.pretrain_data is None or config.ppo.ptx_coef == 0:
        return loaded.prompts, []
    rows = load_rows(
        data.pretrain_data, flag="--pretrain_data", split=data.pretrain_split, max_samples=data.max_samples
    )
    key = data.pretrain_key or data.input_key
    require_column(rows, key, flag_of_key="--pretrain_key", flag_of_data="--pretrain_data")
    return loaded.prompts, load_documents(rows, tokenizer, key, longest + new_tokens)


def _check_tokens(config: TrainPPOConfig, actor_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reward model and critic read the actor's token ids, so they must know all of them by the same names."""
    model = config.model
    for flag, name in (("--reward_pretrain", model.reward_pretrain), ("--critic_pretrain", model.critic_pretrain)):
        if name is None:
            continue
        its_config = check_model(name, flag)
        try:
            theirs = AutoTokenizer.from_pretrained(name).get_vocab()  # may hold more, such as a [PAD] of its own
            same = all(theirs.get(token) == token_id for token, token_id in tokenizer.get_vocab().items())
        except (OSError, ValueError, KeyError):
            same = its_config.get_text_config().vocab_size == actor_config.get_text_config().vocab_size
            logger.info("%s %s has no tokenizer of its own; the sizes of the vocabularies were compared", flag, name)
        if not same:
            raise ValueError(
                f"{flag} {name} has another vocabulary than --pretrain {model.pretrain}, and would read token ids that "
                "are not its own. Use a model of the same family" + (", or a --reward_fn." if "reward" in flag else ".")
            )


def _scorer(config: TrainPPOConfig, strategy: DeepspeedStrategy, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """The Python function of ``--reward_fn``, or the frozen model of ``--reward_pretrain``."""
    model = config.model
    if model.reward_fn is not None:
        return FunctionScorer(load_reward_function(model.reward_fn), model.reward_fn, tokenizer)
    assert model.reward_pretrain is not None, "validated before"
    with naming_model("--reward_pretrain", model.reward_pretrain):
        reward = get_llm_for_sequence_regression(
            model.reward_pretrain,
            "reward",
            bf16=config.deepspeed.bf16,
            flash_attn=model.flash_attn,
            value_head_prefix=model.value_head_prefix,
        )
    frozen, size = strategy.prepare_frozen(reward), config.ppo.micro_rollout_batch_size
    return ModelScorer(frozen, size, pad_token_id(tokenizer), strategy.comm, strategy.device)
