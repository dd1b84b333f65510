"""Engine that the options of a run name."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.engine import LONGEST, check_engines, check_like
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


def samples_with_vllm(config: TrainPPOConfig) -> bool:
    """True if vLLM samples, on the ranks that train or on those that only sample."""
    return config.generation.rollout_engine == "vllm"


def training_engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Make the engine of a trainer, checked with ``--engine_check on``.

    It samples with the actor's own module, or with a copy of it in vLLM.
    """
    policy: Any = actor.module.model
    fits_gathered = strategy.fits_gathered(actor, config.ppo.offload_idle)
    engine = new_engine(
        config,
        policy,
        tokenizer,
        actor_config=actor_config,
        # beside rollout ranks, which run vLLM, this engine only evaluates
        in_vllm=samples_with_vllm(config) and config.orchestrator.rollout_ranks == 0,
        together=None if fits_gathered else strategy.any_rank,
    )
    may_merge = isinstance(engine, HFEngine) and config.lora.lora_rank > 0 and fits_gathered
    if may_merge and strategy.fits_merged(actor, config.ppo.offload_idle):
        actor.merge_when_gathered()

    if config.generation.engine_check == "on":
        check_like(engine, lambda engines: check_engines(config, strategy, actor, engines=engines))
    return engine


def new_engine(
    config: TrainPPOConfig,
    policy: Any,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    in_vllm: bool,
    together: Callable[[bool], bool] | None = None,
) -> Engine:
    """Make an engine that samples from ``policy``.

    With ``together`` ranks step in lockstep: it returns True on all ranks if one of them passes True.
    """
    generation = config.generation
    eos = eos_token_ids(policy, tokenizer)
    ids = sampled_ids(tokenizer, actor_config)
    ids.check_ends(eos, generation.stop_token_ids)

    if in_vllm:
        reads_images = bool(placeholders(actor_config))
        if reads_images:  # vLLM loads the processor too, and its errors name no flag
            load_processor(config.model.pretrain, "--pretrain", config.model.trust_remote_code)
        return VLLMEngine(
            base_model_of(config.model.pretrain),
            config,
            _max_tokens(config, actor_config),
            eos_token_ids=eos,
            reads_images=reads_images,
            sampled_ids=ids,
            decode=decoder(tokenizer),
        )

    device = next(policy.parameters()).device
    recorder = choose_recorder(
        generation.cuda_graphs, actor_config, device, in_lockstep=together is not None
    )
    return HFEngine(
        policy,
        eos,
        pad_token_id(tokenizer),
        max_batch_size=generation.max_num_seqs,
        any_rank=together,
        sampled_ids=ids,
        decode=decoder(tokenizer),
        new_recorder=recorder,
    )


def _max_tokens(config: TrainPPOConfig, actor_config: PreTrainedConfig) -> int:
    """Tokens of the longest row, of the run or of the engine's check, within the model's context."""
    prompt_and_response = config.data.prompt_max_len + config.generation.generate_max_len
    episode = config.agents.episode_max_len or 0
    longest = max(prompt_and_response, episode, LONGEST)
    return min(longest, context_length(actor_config) or longest)
