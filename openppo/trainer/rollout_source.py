"""Rollout source of a PPO trainer: responses or agents' episodes, synchronous or asynchronous."""

from transformers import PreTrainedConfig

from openppo.config import TrainPPOConfig
from openppo.models.pretrained import context_length, eos_token_ids
from openppo.rollout.driver import EngineDriver, Leave
from openppo.rollout.players import PlayerParts
from openppo.sources.build import async_source
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import HeldOut
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.synchronous import PromptSource
from openppo.sources.task import Tasks
from openppo.trainer.components import PPOComponents
from openppo.trainer.images import prepare_for_images
from openppo.types import RolloutSource

SHOWS_IMAGES = "images"
"""Key in the launch's store: "yes" if samples may contain images.

Trainers post it, and rollout ranks wait for it.
"""


def is_async(config: TrainPPOConfig, tasks: Tasks) -> bool:
    """True if samples are made beside training, as options or several tasks require."""
    return config.orchestrator.is_async or tasks.mixed


def make_rollout_source(
    config: TrainPPOConfig,
    components: PPOComponents,
    tasks: Tasks,
    actor_config: PreTrainedConfig,
) -> RolloutSource:
    """Make the source of the samples of ``tasks``, which have prompts and scorers."""
    strategy = components.strategy
    runs_beside_training = is_async(config, tasks)

    vision = prepare_for_images(components, config, tasks.have_agents)
    if strategy.is_main:
        strategy.launch.post(SHOWS_IMAGES, "no" if vision is None else "yes")

    assert components.engine is not None
    parts = PlayerParts(
        driver=EngineDriver(components.engine, components.stop),
        tokenizer=components.tokenizer,
        eos_token_ids=eos_token_ids(components.actor.module.model, components.tokenizer),
        comm=strategy.comm,
        longest=components.data.longest,
        context=context_length(actor_config),
        vision=vision,
    )
    leave: Leave = config.orchestrator.running_requests if runs_beside_training else "abandon"
    sampler = RankSampler(
        components.engine,
        components.actor,
        GroupPlayer(tasks.players(parts), parts.driver),
        comm=strategy.comm,
        device=strategy.device,
        version=lambda: components.state.global_step,
        fits_once=config.deepspeed.deterministic,
        leave=leave,
    )
    own_scorer = components.grading.scorer
    held_out = HeldOut(
        config,
        tasks.tasks,
        sampler,
        stop=components.stop,
        weights_to_save=components.weights_to_save,
        scorer=own_scorer or tasks.scorer,
        replaces_rewards=own_scorer is not None,
    )
    hooks = components.maker.hooks
    if not runs_beside_training:
        (task,) = tasks.tasks
        return PromptSource(
            config, task, sampler, held_out=held_out, hooks=hooks, tokenizer=components.tokenizer
        )
    return async_source(
        config, strategy, sampler, held_out=held_out, hooks=hooks, tasks=tasks, parts=parts
    )
