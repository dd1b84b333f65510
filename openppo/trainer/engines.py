"""The engine that options ask for, and its check: log-probs of a few sampled tokens, on which the actor must agree.

Where they do not, PPO's ratios are wrong before the first update, without any error.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.media import placeholders
from openppo.models.pretrained import (
    base_model_of,
    context_length,
    eos_token_ids,
    load_processor,
    pad_token_id,
    sampled_ids,
)
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.engine_check import REQUESTS, check_engines, check_like
from openppo.types import StopCheck

LONGEST = max(len(prompt) + n_new for prompt, n_new in REQUESTS)


def training_engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM; checked with ``--engine_check on``."""
    if (
        config.orchestrator.rollout_ranks > 0
    ):  # it only evaluates: what a vLLM takes is on the ranks that sample
        config = replace(config, generation=replace(config.generation, rollout_engine="hf"))
    policy: Any = actor.module.model
    together = None if strategy.fits_gathered(actor, config.ppo.offload_idle) else strategy.any_rank
    engine = new_engine(
        config,
        policy,
        tokenizer,
        stop=stop,
        actor_config=actor_config,
        together=together,
        show_progress=strategy.is_main,
    )
    if isinstance(engine, HFEngine) and config.lora.lora_rank > 0 and together is None:
        actor.merges_adapters = strategy.fits_merged(actor, config.ppo.offload_idle)
    if config.generation.engine_check == "on":
        check_like(engine, lambda engines: check_engines(config, strategy, actor, engines=engines))
    engine.decode = decoder(tokenizer)
    return engine


def new_engine(
    config: TrainPPOConfig,
    policy: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
    together: Callable[[bool], bool] | None = None,
    show_progress: bool = False,
) -> Engine:
    """An engine that samples from ``policy``, in lockstep with ``together``."""
    eos, generation = eos_token_ids(policy, tokenizer), config.generation
    ids = sampled_ids(tokenizer, actor_config)
    ids.check_ends(eos, generation.stop_token_ids)
    common: dict[str, Any] = {"show_progress": show_progress, "stop": stop}
    if generation.rollout_engine == "vllm":
        episode = config.agents.episode_max_len or 0
        longest = max(config.data.prompt_max_len + generation.generate_max_len, episode, LONGEST)
        max_tokens = min(longest, context_length(actor_config) or longest)
        if placeholders(actor_config):  # vLLM loads the processor too, and its errors name no flag
            load_processor(config.model.pretrain, "--pretrain", config.model.trust_remote_code)
        common |= {"reads_images": bool(placeholders(actor_config)), "sampled_ids": ids}
        return VLLMEngine(
            base_model_of(config.model.pretrain), config, max_tokens, eos_token_ids=eos, **common
        )
    device = next(policy.parameters()).device
    recorder = choose_recorder(
        generation.cuda_graphs, actor_config, device, in_lockstep=together is not None
    )
    common |= {"any_rank": together, "new_recorder": recorder}
    engine = HFEngine(
        policy, eos, pad_token_id(tokenizer), max_batch_size=generation.max_num_seqs, **common
    )
    engine.sampled_ids = ids
    return engine
