"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.experience.maker import ExperienceMaker
from openppo.models.pretrained import pad_token_id, sampled_ids
from openppo.models.sampled_ids import SampledIds
from openppo.orchestrator.build import async_steps
from openppo.rollout.rollout import SamplerMaker
from openppo.rollout.tasks import TaskMaker
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.signals import SignalStop
from openppo.tracking import PhaseTimer, StepProfiler, Tracker, Trackers
from openppo.trainer.batch_plan import BatchPlan, batch_plan
from openppo.trainer.callbacks import Callback, StopWhen
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
from openppo.trainer.trackers import rollout_trackers, start_trackers
from openppo.types import RolloutSource

HEADLINE = "reward kl clip_fraction value_loss entropy response_length eval_reward eval_pass@1 time/step_s".split()
"""Metrics that the console shows."""

Checked = tuple[PreTrainedTokenizerBase, PreTrainedConfig, PPOData]


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | SamplerMaker | None = None,
    trackers: Sequence[Tracker] = (),
    **objects: Unpack[Given],
) -> PPOTrainer:
    """A trainer; ``objects`` fill ``OwnObjects``, ``trackers`` log on rank 0. ``ValueError`` names flag or object."""
    maker, source = (source, None) if isinstance(source, SamplerMaker) else (None, source)
    strategy = strategy or DeepspeedStrategy(
        config.deepspeed, rollout_ranks=config.orchestrator.rollout_ranks
    )
    run = _before_models(config, strategy, OwnObjects(**objects), maker=maker, source=source)
    config, components = _with_models(run, strategy, trackers)
    if config.run.stop_when:
        callbacks = [*callbacks, StopWhen(config.run.stop_conditions)]
    source = source or make_rollout_source(config, components, maker, actor_config=run.actor_config)
    trainer = PPOTrainer(config, components, source, callbacks=callbacks)
    run.checkpointer.begin(trainer.load_checkpoint)
    log_ppo_start(config, components, run.plan)
    return trainer


@dataclass(frozen=True)
class _Run:
    """A run before its models are loaded: all is checked that needs no weights."""

    config: TrainPPOConfig
    own: OwnObjects
    tokenizer: PreTrainedTokenizerBase
    actor_config: PreTrainedConfig
    data: PPOData
    estimate: Estimate | None
    plan: BatchPlan
    checkpointer: Checkpointer
    samples: bool
    """Whether it samples from a policy, or trains on a ``source`` of the caller."""
    scorer: Any
    eval_scorer: Any


def _before_models(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    own: OwnObjects,
    *,
    maker: SamplerMaker | None,
    source: RolloutSource | None,
) -> _Run:
    """Check options, read data, plan, and build rewards, whose models are loaded first."""
    samples = source is None
    config = own.named(config, strategy.comm, samples, are_tasks=isinstance(maker, TaskMaker))
    tokenizer, actor_config, data = checked = _checked(
        config, strategy, samples, maker=maker, own=own
    )
    config, estimate, rewards = _estimated(
        config, strategy, samples, maker=maker, own=own, checked=checked
    )
    plan = _plan(config, strategy.comm.world_size, len(data.prompts), source=source, maker=maker)
    files = user_files(config, rewards.tasks.tasks)
    prints = data.fingerprints | own.fingerprints()
    return _Run(
        config=config,
        own=own,
        tokenizer=tokenizer,
        actor_config=actor_config,
        data=data,
        estimate=estimate,
        plan=plan,
        checkpointer=Checkpointer(config, strategy, "ppo", data=prints, user_files=files),
        samples=samples,
        scorer=rewards.build() if samples else None,
        eval_scorer=rewards.build_held_out() if samples else None,
    )


def _with_models(
    run: _Run, strategy: DeepspeedStrategy, trackers: Sequence[Tracker]
) -> tuple[TrainPPOConfig, PPOComponents]:
    """Load models, start the engine, and put the parts together; the config says what models can do."""
    config = run.config
    tokenizer = run.tokenizer
    data = run.data
    comm = strategy.comm
    ids_of = partial(sampled_ids, tokenizer, run.actor_config)
    models = load_models(config, strategy, run.own, plan=run.plan, ids_of=ids_of)
    actor, critic = models.actor, models.critic
    config = sharing(config, strategy, actor, critic, models.reference)
    hooks = _hooks(run, strategy, ids_of())
    engine = None
    if run.samples:
        engine = training_engine(
            config,
            strategy,
            actor,
            tokenizer=tokenizer,
            stop=hooks.stop,
            actor_config=run.actor_config,
        )
    strategy.seed_per_rank()  # after the engine: vLLM seeds everything too
    ema = (
        ParameterAverage(actor, config.ppo.ema_beta, _spare(run.estimate))
        if config.ppo.enable_ema
        else None
    )
    run.checkpointer.attach({"actor": actor, "critic": critic}, ema)
    with strategy.uncompiled():
        pack_documents_to = packed_row_length(
            actor, data.documents, data.longest, device=strategy.device
        )
    critic_step = (
        None if critic is None else CriticStep(critic, config, comm, device=strategy.device)
    )
    components = PPOComponents(
        strategy=strategy,
        tokenizer=tokenizer,
        actor=actor,
        critic_step=critic_step,
        maker=_maker(
            config,
            strategy,
            models,
            critic_step=critic_step,
            pad=pad_token_id(tokenizer),
            hooks=hooks,
        ),
        engine=engine,
        scorer=run.scorer,
        data=data,
        trackers=_trackers(config, strategy, run.plan, saver=run.checkpointer, own=trackers),
        grading=Grading.of(comm, config.eval_rewards, config.evaluation, scorer=run.eval_scorer),
        ema=ema,
        pack_documents_to=pack_documents_to,
        checkpointer=run.checkpointer,
        stop=hooks.stop,
        estimate=run.estimate,
    )
    return config, components


def _hooks(run: _Run, strategy: DeepspeedStrategy, ids: SampledIds) -> Hooks:
    config, comm = run.config, strategy.comm
    traced = StepProfiler(config.run.save_path, config.tracking, comm.rank).phase
    return Hooks(
        timer=PhaseTimer(traced, run.estimate.peaks if run.estimate else None),
        stop=SignalStop(comm),
        uncompiled=strategy.uncompiled,
        sources=run.data.source_names,
        sampled_ids=ids,
    )


def _maker(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    models: Models,
    critic_step: CriticStep | None,
    pad: int,
    hooks: Hooks,
) -> ExperienceMaker:
    """The experience maker; where one optimizer step is all, it trains the critic in the same pass."""
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


def _checked(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    samples: bool,
    maker: SamplerMaker | None,
    own: OwnObjects,
) -> Checked:
    """Tokenizer, the actor's config, and data, once everything has been checked that needs no weights."""
    if samples and maker is None and config.agents.form is not None:
        raise ValueError(
            f"--{config.agents.form}: pass source=agent_source(config.agents), of openppo.agents."
        )
    own_rewards = None if maker is None else maker.gives_rewards
    own_source = not samples or isinstance(maker, TaskMaker)
    check_options(config, strategy.comm, own_source=own_source, own_rewards=own_rewards)
    tokenizer, actor_config = check_models(config, strategy, samples, own=own)
    if maker is not None:
        maker.check(tokenizer)
    if not samples:
        return (
            tokenizer,
            actor_config,
            load_ppo_data(config, tokenizer, actor_config, comm=strategy.comm, prompts=False),
        )
    data = load_tasks_data(
        TaskMaker.of(config, maker), tokenizer, actor_config, comm=strategy.comm, own=own
    )
    if data.kinds:
        check_run_with_images(config, data, actor_config)
    if config.evaluation.val_only and not data.held_out:
        raise ValueError(
            "--val_only: no task has eval_data: give it to one in the file of --tasks."
        )
    return tokenizer, actor_config, data


def _estimated(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    samples: bool,
    maker: SamplerMaker | None,
    own: OwnObjects,
    checked: Checked,
) -> tuple[TrainPPOConfig, Estimate | None, TaskRewards]:
    """``config`` with sizes by memory, whose estimate is logged, and what rewards are made of; a dry run ends here."""
    (tokenizer, actor_config, data) = checked
    estimate = None
    if samples or config.run.dry_run:
        config, estimate = estimated_ppo(
            config, data, strategy, configs=own.configs | {"--pretrain": actor_config}
        )
    rewards = TaskRewards(
        TaskMaker.of(config, maker),
        tokenizer,
        strategy,
        data=data,
        actor_config=actor_config,
        function=own.reward_fn,
    )
    if config.run.dry_run and samples:
        rewards.check()
    log_estimate(estimate, config, strategy)
    return config, estimate, rewards


def _trackers(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    plan: BatchPlan,
    saver: Checkpointer,
    own: Sequence[Tracker],
) -> Trackers:
    """Those of options, and on rank 0 those of the caller."""
    resume_step = None if config.evaluation.val_only else saver.found_step
    config, own = config.for_evaluation, own if strategy.is_main else ()
    own = [*own, *rollout_trackers(config, strategy, resume_step)]
    return start_trackers(
        config, strategy, HEADLINE, total_steps=plan.n_steps, resume_step=resume_step, own=own
    )


def _plan(
    config: TrainPPOConfig,
    n_ranks: int,
    n_prompts: int,
    source: RolloutSource | None,
    maker: SamplerMaker | None,
) -> BatchPlan:
    plan = batch_plan(config, n_ranks, n_prompts, source=source)
    if source is not None or not is_async(config, maker):
        return plan
    n_steps = async_steps(config, n_prompts, isinstance(maker, TaskMaker))
    return replace(plan, steps=[config.prompts_per_step] * n_steps, episodes=1)


def _spare(estimate: Estimate | None) -> int:
    """Bytes of the device that an estimate leaves free, but for a tenth of all."""
    return (
        0
        if estimate is None
        else estimate.machine.room * 9 // 10 - estimate.phases[estimate.largest]
    )
