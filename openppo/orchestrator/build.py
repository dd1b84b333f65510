"""Builders of asynchronous runs, for ranks that train and ranks that only sample."""

from torch import nn

from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.orchestrator.coordinator import Coordinator
from openppo.orchestrator.groups import GroupPlan, GroupPlayer
from openppo.orchestrator.schedule import TaskSchedule
from openppo.orchestrator.source import AsyncSource, Engines
from openppo.orchestrator.work_buffer import WorkBuffer
from openppo.orchestrator.worker import RolloutRank, Worker
from openppo.rewards import Scorer
from openppo.rollout.engine import Engine
from openppo.rollout.tasks import TaskPlayers, TaskSampler
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.links import connect
from openppo.strategy.trainable_model import TrainableModel
from openppo.strategy.weights import WeightReceiver, WeightSender, WholeWeights
from openppo.types import Prompt

_COORDINATOR = "coordinator"
"""Key of the coordinator's address in the launch's store."""


def async_steps(config: TrainPPOConfig, n_prompts: int, are_tasks: bool) -> int:
    """Return the number of global steps, whose batches may span passes over the prompts."""
    has_endless_prompts = config.agents.environment is not None and not config.data.prompt_data
    if are_tasks or has_endless_prompts:
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
    actor: TrainableModel,
    hooks: Hooks,
    engines: Engines,
    scorer: Scorer | None,
    prompts: list[Prompt],
    tasks: TaskPlayers,
) -> AsyncSource:
    """Build the source of the ranks that train; on the first also the coordinator.

    Without rollout ranks, each rank has a worker too.
    """
    asynchronous = config.orchestrator
    comm = strategy.comm
    launch = strategy.launch
    overlaps = asynchronous.rollout_ranks == 0
    plans = _plans(tasks, prompts)
    n_steps = async_steps(config, len(prompts), tasks.are_named)
    source = AsyncSource(config, actor, engines, comm=comm, hooks=hooks, n_steps=n_steps)

    if strategy.is_main:
        schedule = TaskSchedule(
            {task.name: task.progress for task in tasks.tasks}, tasks.ratios, tasks.newcomer
        )
        last_step = min(n_steps, config.ppo.max_steps or n_steps)
        source.coordinator = Coordinator(
            WorkBuffer(config.prompts_per_step, asynchronous.max_staleness, asynchronous.stale),
            schedule,
            plans,
            most=last_step * config.prompts_per_step,
            n_workers=comm.world_size if overlaps else asynchronous.rollout_ranks,
            pauses=overlaps,
        )
        launch.post(_COORDINATOR, source.coordinator.workers.entrance.address)
        source.end_service = tasks.serve(source.coordinator)

    if overlaps:
        player = _player(config, engines.sampler, plans, scorer=scorer)
        link = connect(launch.wait_for(_COORDINATOR))
        source.worker = Worker(player, link, launch.rank, leave=asynchronous.running_requests)
    else:
        source.sender = WeightSender(launch)
    source.scorer = scorer if scored_by_trainers(config) else None
    return source


def rollout_rank(
    config: TrainPPOConfig,
    strategy: InferenceStrategy,
    engine: Engine,
    policy: nn.Module,
    sampler: TaskSampler,
    scorer: Scorer | None,
    prompts: list[Prompt],
    tasks: TaskPlayers,
) -> RolloutRank:
    """Build the job of a rank that only samples, with ``policy`` the Hugging Face model of ``engine``."""
    launch = strategy.launch
    player = _player(config, sampler, _plans(tasks, prompts), scorer=scorer)
    link = connect(launch.wait_for(_COORDINATOR))
    worker = Worker(player, link, launch.rank, leave=config.orchestrator.running_requests)
    return RolloutRank(
        strategy,
        engine,
        WholeWeights(policy),
        receiver=WeightReceiver(launch, policy),
        worker=worker,
    )


def _plans(tasks: TaskPlayers, prompts: list[Prompt]) -> dict[str, GroupPlan]:
    """Make the plan of each task, by its name."""
    plans: dict[str, GroupPlan] = {}
    for task in tasks.tasks:
        task_prompts = [prompt for prompt in prompts if prompt.task == task.name]
        plans[task.name] = GroupPlan.of(task, task_prompts)
    return plans


def _player(
    config: TrainPPOConfig, sampler: TaskSampler, plans: dict[str, GroupPlan], scorer: Scorer | None
) -> GroupPlayer:
    return GroupPlayer(plans, sampler, None if scored_by_trainers(config) else scorer)
