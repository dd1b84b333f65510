"""The engine that options ask for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.models.pretrained import base_model_of, context_length, eos_token_ids, pad_token_id
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.engine_check import LONGEST, REQUESTS, check_engines
from openppo.types import StopCheck


def training_engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM; checked with ``--engine_check on``."""
    if config.orchestrator.rollout_ranks > 0:  # it only evaluates: what a vLLM takes is on the ranks that sample
        config = replace(config, generation=replace(config.generation, rollout_engine="hf"))
    policy: Any = actor.module.model
    together = None if strategy.fits_gathered(actor, config.ppo.offload_idle) else strategy.any_rank
    engine = new_engine(config, policy, tokenizer, stop, actor_config, together, strategy.is_main)
    checked: dict[str, Engine] = {"": engine}
    if isinstance(engine, HFEngine):
        checked = {"": HFEngine(policy, (), 0, len(REQUESTS), together)}
        if engine.new_recorder is not None:
            checked[" with --cuda_graphs"] = HFEngine(policy, (), 0, len(REQUESTS), new_recorder=engine.new_recorder)
    if config.generation.engine_check == "on":
        check_engines(config, strategy, actor, checked)
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
    common: dict[str, Any] = {"show_progress": show_progress, "stop": stop}
    if generation.rollout_engine == "vllm":
        episode = config.agents.episode_max_len or 0
        longest = max(config.data.prompt_max_len + generation.generate_max_len, episode, LONGEST)
        max_tokens = min(longest, context_length(actor_config) or longest)
        return VLLMEngine(base_model_of(config.model.pretrain), config, max_tokens, eos, **common)
    recorder = CUDARecorder if generation.cuda_graphs and together is None else None
    if generation.cuda_graphs and recorder is None:
        logger.warning("--cuda_graphs: ranks in lockstep cannot replay steps; they are launched as usual")
    common |= {"any_rank_busy": together, "new_recorder": recorder}
    return HFEngine(policy, eos, pad_token_id(tokenizer), generation.max_num_seqs, **common)
