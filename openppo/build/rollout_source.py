"""Rollout source of a PPO trainer: responses or agents' episodes, synchronous or asynchronous."""

from openppo.build.engine import Sampling
from openppo.config import TrainPPOConfig
from openppo.rollout.driver import Leave
from openppo.sources.build import async_source, is_async
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import HeldOut
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.synchronous import PromptSource
from openppo.sources.task import Tasks
from openppo.trainer.components import PPOComponents
from openppo.types import RolloutSource


def make_rollout_source(
    config: TrainPPOConfig, components: PPOComponents, tasks: Tasks, sampling: Sampling
) -> RolloutSource:
    """Make the source of the samples of ``tasks``, which have prompts and scorers."""
    engine = sampling.engine
    parts = sampling.parts
    assert engine is not None and parts is not None, "a run with tasks samples"
    strategy = components.strategy
    runs_beside_training = is_async(config, tasks)

    leave: Leave = config.orchestrator.running_requests if runs_beside_training else "abandon"
    sampler = RankSampler(
        engine,
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
