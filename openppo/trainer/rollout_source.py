"""Rollout source of a PPO trainer: responses or agents' episodes, synchronous or asynchronous."""

from transformers import PreTrainedConfig

from openppo.config import TrainPPOConfig
from openppo.models.pretrained import context_length, eos_token_ids
from openppo.orchestrator.build import async_source
from openppo.orchestrator.source import Engines
from openppo.rollout.driver import Leave
from openppo.rollout.samplers import Players, SamplerParts
from openppo.rollout.tasks import TaskPlayers
from openppo.trainer.components import PPOComponents
from openppo.trainer.images import prepare_for_images
from openppo.trainer.source import PromptSource
from openppo.types import RolloutSource

SHOWS_IMAGES = "images"
"""Key in the launch's store: "yes" if samples may contain images.

Trainers post it, and rollout ranks wait for it.
"""


def is_async(config: TrainPPOConfig, players: Players | None) -> bool:
    """True if samples are made beside training, as options or several tasks require."""
    return config.orchestrator.is_async or isinstance(players, TaskPlayers)


def make_rollout_source(
    config: TrainPPOConfig,
    components: PPOComponents,
    players: Players | None,
    actor_config: PreTrainedConfig,
) -> RolloutSource:
    """Make the source of samples: responses, or the episodes that ``players`` plays."""
    strategy = components.strategy
    runs_beside_training = is_async(config, players)

    vision = prepare_for_images(components, config, players is not None)
    if strategy.is_main:
        strategy.launch.post(SHOWS_IMAGES, "no" if vision is None else "yes")

    leave: Leave = config.orchestrator.running_requests if runs_beside_training else "abandon"
    assert components.engine is not None
    parts = SamplerParts(
        engine=components.engine,
        tokenizer=components.tokenizer,
        eos_token_ids=eos_token_ids(components.actor.module.model, components.tokenizer),
        comm=strategy.comm,
        stop=components.stop,
        longest=components.data.longest,
        context=context_length(actor_config),
        has_rewards=components.scorer is not None or config.rewards.are_none,
        leave=leave,
        vision=vision,
    )
    if not runs_beside_training:
        sampler = None if players is None else players.make(parts)
        return PromptSource(config, components, sampler)

    tasks = TaskPlayers.of(config, players)
    task_sampler = tasks.make(parts)
    held_out = PromptSource(config, components, task_sampler)
    return async_source(
        config,
        strategy,
        components.actor,
        hooks=components.maker.hooks,
        engines=Engines(held_out, task_sampler, held_out.with_weights),
        scorer=components.scorer,
        prompts=components.data.prompts,
        tasks=tasks,
    )
