"""Trainer or rollout rank of one process of a launch."""

import os
import sys
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.models import check_models
from openppo.build.engine import SHOWS_IMAGES
from openppo.build.engines import new_engine, samples_with_vllm
from openppo.build.policy_inputs import run_vision
from openppo.build.ppo import build_ppo_trainer
from openppo.build.roles import loading
from openppo.build.rows import load_run_data
from openppo.build.scorers import ScorerBuilder
from openppo.config import TrainPPOConfig
from openppo.datasets.vision import Vision
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.merge_lora import to_bf16
from openppo.models.pretrained import context_length, eos_token_ids
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import PlayerParts, Players
from openppo.sources.build import rollout_rank, scored_by_trainers
from openppo.sources.task import Tasks
from openppo.sources.worker import RolloutRank
from openppo.strategy.comm import InferenceStrategy
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.run_data import RunData


def build_rank(
    config: TrainPPOConfig, source: Players | Tasks | None = None
) -> PPOTrainer | RolloutRank:
    """Build the trainer of this rank or, on the last ``--rollout_ranks``, the sampling for trainers."""
    n_sampling = config.orchestrator.rollout_ranks
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if rank < world_size - n_sampling:
        return build_ppo_trainer(config, source=source)
    if config.run.dry_run:  # which estimates the memory of trainers
        sys.exit()

    strategy = InferenceStrategy(
        config.deepspeed.bf16,
        rollout_ranks=n_sampling,
        fused_kernels=config.deepspeed.fused_kernels,
    )
    tokenizer, actor_config = check_models(config, strategy)
    tasks = Tasks.of(config, source)
    tasks.check(tokenizer)
    data = load_run_data(tasks, tokenizer, actor_config, comm=strategy.comm)
    loaded_tasks = data.tasks
    if not scored_by_trainers(config):
        loaded_tasks = ScorerBuilder(data, tokenizer, strategy, actor_config=actor_config).build()

    policy = _load_policy(config, strategy)
    engine = new_engine(
        config,
        policy,
        tokenizer,
        actor_config=actor_config,
        in_vllm=samples_with_vllm(config),
    )

    vision = _vision(
        config, strategy, tokenizer, actor_config=actor_config, data=data, plays=tasks.have_agents
    )
    parts = PlayerParts(
        driver=EngineDriver(engine),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(policy, tokenizer),
        comm=strategy.comm,
        longest=data.longest,
        context=context_length(actor_config),
        vision=vision,
    )
    return rollout_rank(
        config,
        strategy,
        engine,
        policy=policy,
        tasks=replace(tasks, tasks=loaded_tasks),
        parts=parts,
    )


def _vision(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    data: RunData,
    plays: bool,
) -> Vision | None:
    """Reader of images; None unless trainers post that samples may contain some."""
    if strategy.launch.wait_for(SHOWS_IMAGES) != "yes":
        return None
    return run_vision(
        config.model,
        tokenizer,
        actor_config,
        options=config.data,
        kinds=data.kinds,
        plays=plays,
    )


def _load_policy(config: TrainPPOConfig, strategy: InferenceStrategy) -> Any:
    """Load the Hugging Face model to sample from, in the precision of the trainers' forwards."""
    pretrain = config.model.pretrain
    with model_error_context("--pretrain", pretrain), strategy.loading():
        actor = Actor(pretrain, temperature=config.generation.temperature, **loading(config))

    # Weights stay trainable: torch rounds differently with frozen ones.
    policy: Any = actor.eval().to(strategy.device).model
    if config.deepspeed.bf16:
        to_bf16(policy)  # also weights that transformers keeps in float32, as DeepSpeed does
    strategy.fuse(policy)
    return policy
