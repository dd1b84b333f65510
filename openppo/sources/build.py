"""Builders of asynchronous runs, for ranks that train and ranks that only sample."""

from functools import partial

from torch import nn

from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.rollout.engine import Engine
from openppo.rollout.players import PlayerParts
from openppo.sources.asynchronous import AsyncSource
from openppo.sources.coordinator import Coordinator
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import HeldOut
from openppo.sources.outcomes import OutcomePlayer
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.schedule import TaskSchedule
from openppo.sources.task import Tasks
from openppo.sources.work_buffer import WorkBuffer
from openppo.sources.worker import RolloutRank, Worker
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.links import connect
from openppo.strategy.weights import WeightReceiver, WeightSender, WholeWeights

_COORDINATOR = "coordinator"
"""Key of the coordinator's address in the launch's store."""


def is_async(config: TrainPPOConfig, tasks: Tasks) -> bool:
    """True if samples are made beside training, as options or several tasks require."""
    return config.orchestrator.is_async or tasks.mixed


def async_steps(config: TrainPPOConfig, n_prompts: int, tasks: Tasks) -> int:
    """Return the number of global steps, whose batches may span passes over the prompts."""
    has_endless_prompts = config.agents.environment is not None and not config.data.prompt_data
    if tasks.mixed or has_endless_prompts:
        return config.ppo.max_steps or 0

    n_steps = config.ppo.num_episodes * n_prompts // config.prompts_per_step
    if n_steps == 0:
        raise ValueError(
            f"--rollout_batch_size {config.prompts_per_step} needs as many prompts, and "
            f"{config.ppo.num_episodes} x {n_prompts} are given: lower it."
        )
    return n_steps


def scored_by_trainers(config: TrainPPOConfig) -> bool:
    """True if trainers score batches, since reward models are on the ranks that train."""
    return bool(config.rewards.reward_pretrain or config.rewards.prm_pretrain)


def async_source(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    sampler: RankSampler,
    held_out: HeldOut,
    hooks: Hooks,
    tasks: Tasks,
    parts: PlayerParts,
) -> AsyncSource:
    """Build the source of the ranks that train; on the first also the coordinator.

    Without rollout ranks, each rank has a worker too, which plays with ``parts``.
    """
    asynchronous = config.orchestrator
    launch = strategy.launch
    overlaps = asynchronous.rollout_ranks == 0
    n_prompts = sum(len(task.prompts) for task in tasks.tasks)
    n_steps = async_steps(config, n_prompts, tasks)

    coordinator = None
    if strategy.is_main:
        progress = {task.name: task.progress for task in tasks.tasks}
        schedule = TaskSchedule(progress, tasks.ratios, mixed=tasks.mixed)
        last_step = min(n_steps, config.ppo.max_steps or n_steps)
        coordinator = Coordinator(
            WorkBuffer(config.prompts_per_step, asynchronous.max_staleness, asynchronous.stale),
            schedule,
            {task.name: task for task in tasks.tasks},
            most=last_step * config.prompts_per_step,
            n_workers=strategy.comm.world_size if overlaps else asynchronous.rollout_ranks,
            pauses=overlaps,
        )
        launch.post(_COORDINATOR, coordinator.workers.entrance.address)

    worker = None
    if overlaps:
        worker = _worker(config, strategy, tasks, player=sampler.player, parts=parts)
    return AsyncSource(
        config,
        sampler,
        held_out,
        hooks=hooks,
        n_steps=n_steps,
        newcomer=partial(tasks.newcomer, parts.tokenizer),
        coordinator=coordinator,
        sender=None if overlaps else WeightSender(launch),
        worker=worker,
        scorer=tasks.scorer if scored_by_trainers(config) else None,
        serve=tasks.serve,
    )


def rollout_rank(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    engine: Engine,
    policy: nn.Module,
    tasks: Tasks,
    parts: PlayerParts,
) -> RolloutRank:
    """Build the job of a rank that only samples, with ``policy`` the Hugging Face model of ``engine``."""
    worker = _worker(
        config, strategy, tasks, player=GroupPlayer(tasks.players(parts), parts.driver), parts=parts
    )
    return RolloutRank(
        strategy,
        engine,
        WholeWeights(policy),
        receiver=WeightReceiver(strategy.launch, policy),
        worker=worker,
    )


def _worker(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    tasks: Tasks,
    player: GroupPlayer,
    parts: PlayerParts,
) -> Worker:
    """Make the worker of this rank and connect it to the coordinator."""
    trainers_score = scored_by_trainers(config)
    outcomes = OutcomePlayer(
        {task.name: task for task in tasks.tasks},
        player,
        parts,
        scorer=None if trainers_score else tasks.scorer,
        trainers_score=trainers_score,
    )
    link = connect(strategy.launch.wait_for(_COORDINATOR))
    return Worker(outcomes, link, strategy.launch.rank, leave=config.orchestrator.running_requests)
