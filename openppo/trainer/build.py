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
from openppo.rollout.engine import Engine
from openppo.rollout.players import Players
from openppo.sources.build import async_steps
from openppo.sources.task import Tasks
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
from openppo.trainer.data import RunData, load_only_documents, load_run_data
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
from openppo.trainer.scorers import ScorerBuilder
from openppo.trainer.sharing import sharing
from openppo.trainer.summary import log_ppo_start
from openppo.trainer.supervised.batches import packed_row_length
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

Checked = tuple[PreTrainedTokenizerBase, PreTrainedConfig, RunData]
"""Tokenizer, config of the actor, and data of a run."""


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | Players | Tasks | None = None,
    trackers: Sequence[Tracker] = (),
    **objects: Unpack[Given],
) -> PPOTrainer:
    """Build a trainer from options; ``ValueError`` names the flag or the object at fault.

    ``source`` yields samples, makes the player of an agent's episodes (as ``Players``), or names several ``Tasks``;
    without it the policy responds to prompts. ``trackers`` log on rank 0. ``objects`` are fields of ``OwnObjects`` and
    replace objects that options name: models, a tokenizer, prompts and a reward function.
    """
    tasks: Tasks | None = None
    if source is None or isinstance(source, Players | Tasks):
        tasks = Tasks.of(config, source)
        source = None
    if strategy is None:
        strategy = DeepspeedStrategy(
            config.deepspeed, rollout_ranks=config.orchestrator.rollout_ranks
        )

    run = _prepare(config, strategy, OwnObjects(**objects), tasks=tasks, source=source)
    config, components = _load_and_assemble(run, strategy, trackers)

    if config.run.stop_when:
        callbacks = [*callbacks, StopWhen(config.run.stop_conditions)]
    if source is None:
        assert run.tasks is not None
        source = make_rollout_source(config, components, run.tasks, actor_config=run.actor_config)
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
    data: RunData
    estimate: Estimate | None
    plan: BatchPlan
    checkpointer: Checkpointer
    card: RunCard
    tasks: Tasks | None
    """Tasks with prompts and scorers; None if the caller passed a source of samples."""
    eval_scorer: Any


def _prepare(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    objects: OwnObjects,
    *,
    tasks: Tasks | None,
    source: RolloutSource | None,
) -> _Run:
    """Check options, load data, plan the steps, and build the scorers, whose models are the first to load."""
    samples = tasks is not None
    are_tasks = tasks is not None and tasks.mixed
    config = objects.named(config, strategy.comm, samples, are_tasks=are_tasks)
    if tasks is not None:
        tasks = tasks.with_options(config)

    tokenizer, actor_config, data = _check(config, strategy, tasks=tasks, objects=objects)
    estimate = None
    if samples or config.run.dry_run:
        configs = objects.configs | {"--pretrain": actor_config}
        config, estimate = estimated_ppo(config, data, strategy, configs=configs)

    if tasks is not None:
        tasks = replace(tasks, tasks=data.tasks).with_options(config)
        data = replace(data, tasks=tasks.tasks)
    scorers = ScorerBuilder(
        data, tokenizer, strategy, actor_config=actor_config, function=objects.reward_fn
    )
    if samples and config.run.dry_run:
        scorers.check()
    log_estimate(estimate, config, strategy)  # a dry run ends here

    n_ranks = strategy.comm.world_size
    plan = _plan(config, n_ranks, len(data.prompts), source=source, tasks=tasks)

    files = user_files(config, data.tasks)
    fingerprints = data.fingerprints | objects.fingerprints()
    start = config.model.pretrain
    card = make_run_card(config, strategy.comm, start, rows=data.counts, tasks=data.tasks)
    checkpointer = Checkpointer(
        config, strategy, "ppo", data=fingerprints, user_files=files, facts=card.facts
    )
    eval_scorer = None
    if tasks is not None:
        data = replace(data, tasks=scorers.build())
        tasks = replace(tasks, tasks=data.tasks)
        eval_scorer = scorers.build_held_out()
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
        tasks=tasks,
        eval_scorer=eval_scorer,
    )


def _check(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    tasks: Tasks | None,
    objects: OwnObjects,
) -> Checked:
    """Check options and models without weights; return tokenizer, config of the actor, and data."""
    comm = strategy.comm
    if tasks is not None and not tasks.have_agents and config.agents.form is not None:
        raise ValueError(
            f"--{config.agents.form}: pass source=agent_source(config.agents), from openppo.agents."
        )
    are_tasks = tasks is not None and tasks.mixed
    check_options(
        config,
        comm,
        own_source=tasks is None or are_tasks,
        own_rewards=None if tasks is None else tasks.give_rewards,
    )
    try_own_algorithm(config, comm, are_tasks=are_tasks)
    tokenizer, actor_config = check_models(config, strategy, tasks is not None, objects=objects)

    if tasks is None:
        require(
            config.ppo.prompt_order == "shuffled",
            "--prompt_order: the source gives the prompts; leave it out.",
        )
        return (
            tokenizer,
            actor_config,
            load_only_documents(config, tokenizer, actor_config, comm=comm),
        )

    tasks.check(tokenizer)
    data = load_run_data(tasks, tokenizer, actor_config, comm=comm, objects=objects)
    try_prompt_order(config, data.prompts, comm)
    if data.kinds:
        check_run_with_images(config, data, actor_config)
    if config.evaluation.val_only and not data.held_out:
        raise ValueError("--val_only: no task has eval_data: add it to a task in the --tasks file.")
    return tokenizer, actor_config, data


def _plan(
    config: TrainPPOConfig,
    n_ranks: int,
    n_prompts: int,
    source: RolloutSource | None,
    tasks: Tasks | None,
) -> BatchPlan:
    """Plan the steps; those of an asynchronous run all have full batches."""
    plan = batch_plan(config, n_ranks, n_prompts, source=source)
    if tasks is None or not is_async(config, tasks):
        return plan
    n_steps = async_steps(config, n_prompts, tasks)
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
    if run.tasks is None:
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
