"""Put the parts of an asynchronous run together, on the ranks that train and on those that only sample."""

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
"""Key of its address in the launch's store."""


def async_steps(config: TrainPPOConfig, n_prompts: int, are_tasks: bool) -> int:
    """Global steps: a batch holds groups that are complete, whichever pass over the prompts they are of."""
    if are_tasks or (config.agents.environment is not None and not config.data.prompt_data):
        return config.ppo.max_steps or 0
    n_steps = config.ppo.num_episodes * n_prompts // config.prompts_per_step
    if n_steps == 0:
        least = f"--rollout_batch_size {config.prompts_per_step} needs as many prompts"
        raise ValueError(
            f"{least}, and {config.ppo.num_episodes} x {n_prompts} are given: lower it."
        )
    return n_steps


def scored_by_trainers(config: TrainPPOConfig) -> bool:
    """Whether all rewards are given when a batch is trained on: reward models lie on the ranks that train."""
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
    """The source of the ranks that train; on the first also the coordinator, and without others a worker each."""
    asynchronous = config.orchestrator
    comm = strategy.comm
    launch = strategy.launch
    overlaps, plans = asynchronous.rollout_ranks == 0, _plans(tasks, prompts)
    n_steps = async_steps(config, len(prompts), tasks.are_named)
    source = AsyncSource(config, actor, engines, comm=comm, hooks=hooks, n_steps=n_steps)
    if strategy.is_main:
        buffer = WorkBuffer(config.prompts_per_step, asynchronous.max_staleness, asynchronous.stale)
        most = min(n_steps, config.ppo.max_steps or n_steps) * config.prompts_per_step
        n_workers = comm.world_size if overlaps else asynchronous.rollout_ranks
        schedule = TaskSchedule(
            {task.name: task.share for task in tasks.tasks}, tasks.ratios, tasks.newcomer
        )
        source.coordinator = Coordinator(
            buffer, schedule, plans, most=most, n_workers=n_workers, pauses=overlaps
        )
        launch.post(_COORDINATOR, source.coordinator.workers.entrance.address)
        source.end_service = tasks.serve(source.coordinator)
    if overlaps:
        player = _player(config, engines.sampler, plans, scorer=scorer)
        address = launch.wait_for(_COORDINATOR)
        source.worker = Worker(
            player, connect(address), launch.rank, leave=asynchronous.running_requests
        )
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
    """What a rank that only samples runs; ``policy`` is the Hugging Face model that ``engine`` samples from."""
    launch, player = (
        strategy.launch,
        _player(config, sampler, _plans(tasks, prompts), scorer=scorer),
    )
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
    """The plan of each task, by its name."""
    return {
        t.name: GroupPlan.of(t, [prompt for prompt in prompts if prompt.task == t.name])
        for t in tasks.tasks
    }


def _player(
    config: TrainPPOConfig, sampler: TaskSampler, plans: dict[str, GroupPlan], scorer: Scorer | None
) -> GroupPlayer:
    return GroupPlayer(plans, sampler, None if scored_by_trainers(config) else scorer)
