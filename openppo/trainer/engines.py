"""Engine that the options of a run name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.models.pretrained import (
    base_model_of,
    context_length,
    eos_token_ids,
    load_processor,
    pad_token_id,
    sampled_ids,
)
from openppo.models.vision_models import placeholders
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.engine_check import LONGEST, check_engines, check_like
from openppo.types import StopCheck


def training_engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Make the engine of a trainer, checked with ``--engine_check on``.

    It samples with the actor's own module, or with a copy of it in vLLM.
    """
    if config.orchestrator.rollout_ranks > 0:
        # This engine only evaluates: vLLM runs on the ranks that sample.
        config = replace(config, generation=replace(config.generation, rollout_engine="hf"))

    policy: Any = actor.module.model
    fits_gathered = strategy.fits_gathered(actor, config.ppo.offload_idle)
    engine = new_engine(
        config,
        policy,
        tokenizer,
        stop=stop,
        actor_config=actor_config,
        together=None if fits_gathered else strategy.any_rank,
        show_progress=strategy.is_main,
    )
    if isinstance(engine, HFEngine) and config.lora.lora_rank > 0 and fits_gathered:
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
    """Make an engine that samples from ``policy``.

    With ``together`` ranks step in lockstep: it returns True on all ranks if one of them passes True.
    """
    generation = config.generation
    eos = eos_token_ids(policy, tokenizer)
    ids = sampled_ids(tokenizer, actor_config)
    ids.check_ends(eos, generation.stop_token_ids)

    if generation.rollout_engine == "vllm":
        reads_images = bool(placeholders(actor_config))
        if reads_images:  # vLLM loads the processor too, and its errors name no flag
            load_processor(config.model.pretrain, "--pretrain", config.model.trust_remote_code)
        return VLLMEngine(
            base_model_of(config.model.pretrain),
            config,
            _max_tokens(config, actor_config),
            eos_token_ids=eos,
            show_progress=show_progress,
            stop=stop,
            reads_images=reads_images,
            sampled_ids=ids,
        )

    device = next(policy.parameters()).device
    recorder = choose_recorder(
        generation.cuda_graphs, actor_config, device, in_lockstep=together is not None
    )
    engine = HFEngine(
        policy,
        eos,
        pad_token_id(tokenizer),
        max_batch_size=generation.max_num_seqs,
        any_rank=together,
        show_progress=show_progress,
        stop=stop,
        new_recorder=recorder,
    )
    engine.sampled_ids = ids
    return engine


def _max_tokens(config: TrainPPOConfig, actor_config: PreTrainedConfig) -> int:
    """Tokens of the longest row, of the run or of the engine's check, within the model's context."""
    prompt_and_response = config.data.prompt_max_len + config.generation.generate_max_len
    episode = config.agents.episode_max_len or 0
    longest = max(prompt_and_response, episode, LONGEST)
    return min(longest, context_length(actor_config) or longest)
