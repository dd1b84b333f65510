"""Builder of a PPO trainer: cheap checks first, then models, then the assembly."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.config.fields import require
from openppo.experience.hooks import Hooks
from openppo.experience.maker import ExperienceMaker
from openppo.models.pretrained import pad_token_id, sampled_ids
from openppo.models.sampled_ids import SampledIds
from openppo.orchestrator.build import async_steps
from openppo.rollout.engine import Engine
from openppo.rollout.samplers import Players
from openppo.rollout.tasks import TaskPlayers
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.signals import SignalStop
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import PhaseTimer, StepProfiler, Tracker, Trackers
from openppo.trainer.algorithm_trial import try_own_algorithm, try_prompt_order
from openppo.trainer.batch_plan import BatchPlan, batch_plan
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.cards.run_card import RunCard, make_run_card
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import CriticStep, OnePassCritic
from openppo.trainer.data import PPOData, load_ppo_data
from openppo.trainer.engines import training_engine
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.images import check_run_with_images
from openppo.trainer.memory.estimate import Estimate
from openppo.trainer.memory.sizing import estimated_ppo, log_estimate
from openppo.trainer.model_checks import check_models
from openppo.trainer.models import Models, load_models
from openppo.trainer.objects import Given, OwnObjects
from openppo.trainer.option_checks import check_options
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.resume.edited_files import user_files
from openppo.trainer.rollout_source import is_async, make_rollout_source
from openppo.trainer.sharing import sharing
from openppo.trainer.summary import log_ppo_start
from openppo.trainer.supervised.batches import packed_row_length
from openppo.trainer.task_data import load_tasks_data
from openppo.trainer.task_rewards import TaskRewards
from openppo.trainer.trackers import start_ppo_trackers
from openppo.types import RolloutSource, StopCheck

HEADLINE = [
    "reward",
    "kl",
    "clip_fraction",
    "value_loss",
    "entropy",
    "response_length",
    "eval_reward",
    "eval_pass@1",
    "eval_kl",
    "time/step_s",
]
"""Metrics shown on the console."""

Checked = tuple[PreTrainedTokenizerBase, PreTrainedConfig, PPOData]
"""Tokenizer, config of the actor, and data of a run."""


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | Players | None = None,
    trackers: Sequence[Tracker] = (),
    **objects: Unpack[Given],
) -> PPOTrainer:
    """Build a trainer from options; ``ValueError`` names the flag or the object at fault.

    ``source`` yields samples, or (as ``Players``) makes the sampler of an agent's episodes; without it the policy
    responds to prompts. ``trackers`` log on rank 0. ``objects`` are fields of ``OwnObjects`` and replace objects that
    options name: models, a tokenizer, prompts and a reward function.
    """
    players: Players | None = None
    if isinstance(source, Players):
        players = source
        source = None
    if strategy is None:
        strategy = DeepspeedStrategy(
            config.deepspeed, rollout_ranks=config.orchestrator.rollout_ranks
        )

    run = _prepare(config, strategy, OwnObjects(**objects), players=players, source=source)
    config, components = _load_and_assemble(run, strategy, trackers)

    if config.run.stop_when:
        callbacks = [*callbacks, StopWhen(config.run.stop_conditions)]
    if source is None:
        source = make_rollout_source(config, components, players, actor_config=run.actor_config)
    trainer = PPOTrainer(config, components, source, callbacks=callbacks)
    run.checkpointer.begin(trainer.load_checkpoint)
    log_ppo_start(config, components, run.plan)
    return trainer


@dataclass(frozen=True)
class _Run:
    """A run before its models are loaded, after all checks that need no weights."""

    config: TrainPPOConfig
    objects: OwnObjects
    tokenizer: PreTrainedTokenizerBase
    actor_config: PreTrainedConfig
    data: PPOData
    estimate: Estimate | None
    plan: BatchPlan
    checkpointer: Checkpointer
    card: RunCard
    samples: bool
    """True if the run samples from its policy, False if the caller passed a source of samples."""
    scorer: Any
    eval_scorer: Any


def _prepare(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    objects: OwnObjects,
    *,
    players: Players | None,
    source: RolloutSource | None,
) -> _Run:
    """Check options, load data, plan the steps, and build the scorers, whose models are the first to load."""
    samples = source is None
    are_tasks = isinstance(players, TaskPlayers)
    config = objects.named(config, strategy.comm, samples, are_tasks=are_tasks)

    checked = _check(config, strategy, samples, players=players, objects=objects)
    tokenizer, actor_config, data = checked
    config, estimate, rewards = _estimate(
        config, strategy, samples, players=players, objects=objects, checked=checked
    )
    n_ranks = strategy.comm.world_size
    plan = _plan(config, n_ranks, len(data.prompts), source=source, players=players)

    tasks = rewards.tasks.tasks
    files = user_files(config, tasks)
    fingerprints = data.fingerprints | objects.fingerprints()
    start = config.model.pretrain
    card = make_run_card(config, strategy.comm, start, rows=data.counts, tasks=tasks)
    checkpointer = Checkpointer(
        config, strategy, "ppo", data=fingerprints, user_files=files, facts=card.facts
    )
    return _Run(
        config=config,
        objects=objects,
        tokenizer=tokenizer,
        actor_config=actor_config,
        data=data,
        estimate=estimate,
        plan=plan,
        checkpointer=checkpointer,
        card=card,
        samples=samples,
        scorer=rewards.build() if samples else None,
        eval_scorer=rewards.build_held_out() if samples else None,
    )


def _check(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    samples: bool,
    players: Players | None,
    objects: OwnObjects,
) -> Checked:
    """Check options and models without weights; return tokenizer, config of the actor, and data."""
    comm = strategy.comm
    if samples and players is None and config.agents.form is not None:
        raise ValueError(
            f"--{config.agents.form}: pass source=agent_source(config.agents), from openppo.agents."
        )
    are_tasks = isinstance(players, TaskPlayers)
    check_options(
        config,
        comm,
        own_source=not samples or are_tasks,
        own_rewards=None if players is None else players.gives_rewards,
    )
    try_own_algorithm(config, comm, are_tasks=are_tasks)
    tokenizer, actor_config = check_models(config, strategy, samples, objects=objects)
    if players is not None:
        players.check(tokenizer)

    if not samples:
        require(
            config.ppo.prompt_order == "shuffled",
            "--prompt_order: the source gives the prompts; leave it out.",
        )
        documents = load_ppo_data(config, tokenizer, actor_config, comm=comm, prompts=False)
        return tokenizer, actor_config, documents

    tasks = TaskPlayers.of(config, players)
    data = load_tasks_data(tasks, tokenizer, actor_config, comm=comm, objects=objects)
    try_prompt_order(config, data.prompts, comm)
    if data.kinds:
        check_run_with_images(config, data, actor_config)
    if config.evaluation.val_only and not data.held_out:
        raise ValueError("--val_only: no task has eval_data: add it to a task in the --tasks file.")
    return tokenizer, actor_config, data


def _estimate(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    samples: bool,
    players: Players | None,
    objects: OwnObjects,
    checked: Checked,
) -> tuple[TrainPPOConfig, Estimate | None, TaskRewards]:
    """Estimate and log memory; a dry run ends here.

    Returns ``config`` with sizes that fit, the estimate, and the builder of scorers.
    """
    tokenizer, actor_config, data = checked
    estimate = None
    if samples or config.run.dry_run:
        configs = objects.configs | {"--pretrain": actor_config}
        config, estimate = estimated_ppo(config, data, strategy, configs=configs)

    rewards = TaskRewards(
        TaskPlayers.of(config, players),
        tokenizer,
        strategy,
        data=data,
        actor_config=actor_config,
        function=objects.reward_fn,
    )
    if config.run.dry_run and samples:
        rewards.check()
    log_estimate(estimate, config, strategy)
    return config, estimate, rewards


def _plan(
    config: TrainPPOConfig,
    n_ranks: int,
    n_prompts: int,
    source: RolloutSource | None,
    players: Players | None,
) -> BatchPlan:
    """Plan the steps; those of an asynchronous run all have full batches."""
    plan = batch_plan(config, n_ranks, n_prompts, source=source)
    if source is not None or not is_async(config, players):
        return plan
    n_steps = async_steps(config, n_prompts, isinstance(players, TaskPlayers))
    return replace(plan, steps=[config.prompts_per_step] * n_steps, prompt_epochs=1)


def _load_and_assemble(
    run: _Run, strategy: DeepspeedStrategy, trackers: Sequence[Tracker]
) -> tuple[TrainPPOConfig, PPOComponents]:
    """Load the models, start the engine, and assemble the components.

    Returns the config, without features that a model lacks, and the components.
    """
    ids_of = partial(sampled_ids, run.tokenizer, run.actor_config)
    models = load_models(run.config, strategy, run.objects, plan=run.plan, ids_of=ids_of)
    actor = models.actor
    config = sharing(run.config, strategy, actor, models.critic, models.reference)
    hooks = _hooks(run, strategy, ids_of())

    engine = _engine(run, config, strategy, actor=actor, stop=hooks.stop)
    strategy.seed_per_rank()  # after the engine, because vLLM seeds all generators too

    ema = None
    if config.ppo.enable_ema:
        spare = 0 if run.estimate is None else run.estimate.spare
        ema = ParameterAverage(actor, config.ppo.ema_beta, spare)
    run.checkpointer.attach({"actor": actor, "critic": models.critic}, ema)
    with strategy.uncompiled():
        pack_documents_to = packed_row_length(
            actor, run.data.documents, run.data.longest, device=strategy.device
        )

    critic_step = None
    if models.critic is not None:
        critic_step = CriticStep(models.critic, config, strategy.comm, device=strategy.device)
    grading = Grading.of(
        strategy.comm, config.eval_rewards, config.evaluation, scorer=run.eval_scorer
    )
    pad = pad_token_id(run.tokenizer)
    components = PPOComponents(
        strategy=strategy,
        tokenizer=run.tokenizer,
        actor=actor,
        critic_step=critic_step,
        maker=_experience_maker(
            config,
            strategy,
            models,
            critic_step=critic_step,
            pad=pad,
            hooks=hooks,
        ),
        engine=engine,
        scorer=run.scorer,
        data=run.data,
        trackers=_start_trackers(run, strategy, trackers),
        grading=grading,
        ema=ema,
        pack_documents_to=pack_documents_to,
        checkpointer=run.checkpointer,
        card=run.card,
        stop=hooks.stop,
        estimate=run.estimate,
    )
    return config, components


def _engine(
    run: _Run,
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    stop: StopCheck,
) -> Engine | None:
    """Start the engine that samples from the actor; None if the run does not sample."""
    if not run.samples:
        return None
    return training_engine(
        config,
        strategy,
        actor,
        tokenizer=run.tokenizer,
        stop=stop,
        actor_config=run.actor_config,
    )


def _hooks(run: _Run, strategy: DeepspeedStrategy, ids: SampledIds) -> Hooks:
    """Make the experience maker's timer, stop check and context of the run."""
    profiler = StepProfiler(run.config.run.save_path, run.config.tracking, strategy.comm.rank)
    peaks = None if run.estimate is None else run.estimate.peaks
    return Hooks(
        timer=PhaseTimer(profiler.phase, peaks),
        stop=SignalStop(strategy.comm),
        uncompiled=strategy.uncompiled,
        sources=run.data.source_names,
        sampled_ids=ids,
    )


def _experience_maker(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    models: Models,
    *,
    critic_step: CriticStep | None,
    pad: int,
    hooks: Hooks,
) -> ExperienceMaker:
    """Make the experience maker.

    On rollouts that fit into one optimizer step, it also trains the critic in the pass that computes values.
    """
    make: Any = ExperienceMaker
    if critic_step is not None and OnePassCritic.is_exact(config):
        make = partial(OnePassCritic, critic_step)
    maker: ExperienceMaker = make(
        actor=models.actor,
        critic=models.critic,
        reference=models.reference,
        config=config,
        comm=strategy.comm,
        device=strategy.device,
        pad_token_id=pad,
        hooks=hooks,
    )
    return maker


def _start_trackers(
    run: _Run, strategy: DeepspeedStrategy, own_trackers: Sequence[Tracker]
) -> Trackers:
    """Start the trackers of the run; those of the caller on rank 0."""
    return start_ppo_trackers(
        run.config,
        strategy,
        HEADLINE,
        total_steps=run.plan.n_steps,
        found_step=run.checkpointer.found_step,
        own_trackers=own_trackers,
    )
