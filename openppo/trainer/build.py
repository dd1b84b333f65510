"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.experience.maker import ExperienceMaker
from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.merge_lora import to_bf16
from openppo.models.pretrained import context_length, eos_token_ids, pad_token_id, sampled_ids
from openppo.models.sampled_ids import SampledIds
from openppo.orchestrator.build import async_source, async_steps, rollout_rank, scored_by_trainers
from openppo.orchestrator.source import Engines
from openppo.orchestrator.worker import RolloutRank
from openppo.rollout.driver import Leave
from openppo.rollout.samplers import Players, SamplerParts
from openppo.rollout.sampling import decoder
from openppo.rollout.tasks import TaskPlayers
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.signals import SignalStop
from openppo.tracking import PhaseTimer, StepProfiler, Tracker, Trackers
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.components import (
    PPOComponents,
    check_run_with_images,
    sharing,
)
from openppo.trainer.critic_step import CriticStep, OnePassCritic
from openppo.trainer.data import PPOData, TaskRewards, load_ppo_data, load_tasks_data
from openppo.trainer.engines import new_engine, training_engine
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.memory.estimate import Estimate
from openppo.trainer.memory.sizing import estimated_ppo, log_estimate
from openppo.trainer.models import Models, load_models
from openppo.trainer.objects import Given, OwnObjects
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.resume.edited_files import user_files
from openppo.trainer.roles import check_models, loading
from openppo.trainer.source import PromptSource
from openppo.trainer.startup import check_options, rollout_trackers, run_vision, start_trackers
from openppo.trainer.summary import BatchPlan, batch_plan, log_ppo_start
from openppo.trainer.supervised.batches import packed_row_length
from openppo.types import RolloutSource, StopCheck

_SHOWS_IMAGES = "images"  # what trainers post for rollout ranks: whether samples may have some
HEADLINE = "reward kl clip_fraction value_loss entropy response_length eval_reward eval_pass@1 time/step_s".split()
"""Metrics that the console shows."""

Checked = tuple[PreTrainedTokenizerBase, PreTrainedConfig, PPOData]


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | Players | None = None,
    trackers: Sequence[Tracker] = (),
    **objects: Unpack[Given],
) -> PPOTrainer:
    """A trainer; ``objects`` fill ``OwnObjects``, ``trackers`` log on rank 0. ``ValueError`` names flag or object."""
    players, source = (source, None) if isinstance(source, Players) else (None, source)
    strategy = strategy or DeepspeedStrategy(
        config.deepspeed, rollout_ranks=config.orchestrator.rollout_ranks
    )
    run = _before_models(config, strategy, OwnObjects(**objects), players=players, source=source)
    config, components = _with_models(run, strategy, trackers)
    if config.run.stop_when:
        callbacks = [*callbacks, StopWhen(config.run.stop_conditions)]
    source = source or _source(config, components, players, actor_config=run.actor_config)
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
    players: Players | None,
    source: RolloutSource | None,
) -> _Run:
    """Check options, read data, plan, and build rewards, whose models are loaded first."""
    samples = source is None
    config = own.named(config, strategy.comm, samples, are_tasks=isinstance(players, TaskPlayers))
    tokenizer, actor_config, data = checked = _checked(
        config, strategy, samples, players=players, own=own
    )
    config, estimate, rewards = _estimated(
        config, strategy, samples, players=players, own=own, checked=checked
    )
    plan = _plan(
        config, strategy.comm.world_size, len(data.prompts), source=source, players=players
    )
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
    players: Players | None,
    own: OwnObjects,
) -> Checked:
    """Tokenizer, the actor's config, and data, once everything has been checked that needs no weights."""
    if samples and players is None and config.agents.form is not None:
        raise ValueError(
            f"--{config.agents.form}: pass source=agent_source(config.agents), of openppo.agents."
        )
    own_rewards = None if players is None else players.gives_rewards
    own_source = not samples or isinstance(players, TaskPlayers)
    check_options(config, strategy.comm, own_source=own_source, own_rewards=own_rewards)
    tokenizer, actor_config = check_models(config, strategy, samples, own=own)
    if players is not None:
        players.check(tokenizer)
    if not samples:
        return (
            tokenizer,
            actor_config,
            load_ppo_data(config, tokenizer, actor_config, comm=strategy.comm, prompts=False),
        )
    data = load_tasks_data(
        TaskPlayers.of(config, players), tokenizer, actor_config, comm=strategy.comm, own=own
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
    players: Players | None,
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
        TaskPlayers.of(config, players),
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
    players: Players | None,
) -> BatchPlan:
    plan = batch_plan(config, n_ranks, n_prompts, source=source)
    if source is not None or not _is_async(config, players):
        return plan
    n_steps = async_steps(config, n_prompts, isinstance(players, TaskPlayers))
    return replace(plan, steps=[config.prompts_per_step] * n_steps, episodes=1)


def _is_async(config: TrainPPOConfig, players: Players | None) -> bool:
    return config.orchestrator.is_async or isinstance(players, TaskPlayers)


def build_rank(config: TrainPPOConfig, players: Players | None = None) -> PPOTrainer | RolloutRank:
    """What this rank of a launch runs: a trainer or, on the last ``--rollout_ranks``, what samples for trainers."""
    n_sampling = config.orchestrator.rollout_ranks
    if int(os.environ.get("RANK", "0")) < int(os.environ.get("WORLD_SIZE", "1")) - n_sampling:
        return build_ppo_trainer(config, source=players)
    if config.run.dry_run:  # estimates what trainers need
        sys.exit()
    deepspeed = config.deepspeed
    strategy = InferenceStrategy(
        deepspeed.bf16, rollout_ranks=n_sampling, fused_kernels=deepspeed.fused_kernels
    )
    tokenizer, actor_config = check_models(config, strategy)
    tasks = TaskPlayers.of(config, players)
    tasks.check(tokenizer)
    data = load_tasks_data(tasks, tokenizer, actor_config, comm=strategy.comm)
    scorer = (
        None
        if scored_by_trainers(config)
        else TaskRewards(tasks, tokenizer, strategy, data=data, actor_config=actor_config).build()
    )
    with model_error_context("--pretrain", config.model.pretrain), strategy.loading():
        actor = Actor(
            config.model.pretrain, temperature=config.generation.temperature, **loading(config)
        )
    policy: Any = (
        actor.eval().to(strategy.device).model
    )  # not frozen: torch rounds otherwise with frozen weights
    if deepspeed.bf16:
        to_bf16(policy)  # also what transformers keeps in float32: DeepSpeed keeps nothing
    strategy.fuse(policy)
    engine = new_engine(config, policy, tokenizer, stop=StopCheck(), actor_config=actor_config)
    engine.decode = decoder(tokenizer)
    shows_images = strategy.launch.wait_for(_SHOWS_IMAGES) == "yes"
    what = config.model, tokenizer, actor_config, config.data, data.kinds, players is not None
    vision = run_vision(*what) if shows_images else None
    given = (
        engine,
        tokenizer,
        eos_token_ids(policy, tokenizer),
        strategy.comm,
        StopCheck(),
        data.longest,
    )
    parts = SamplerParts(
        *given,
        context_length(actor_config),
        leave=config.orchestrator.running_requests,
        vision=vision,
    )
    return rollout_rank(
        config,
        strategy,
        engine,
        policy=policy,
        sampler=tasks.make(parts),
        scorer=scorer,
        prompts=data.prompts,
        tasks=tasks,
    )


def _source(
    config: TrainPPOConfig,
    components: PPOComponents,
    players: Players | None,
    actor_config: PreTrainedConfig,
) -> RolloutSource:
    """Samples responses, or what ``players`` plays, in turn with training or beside it."""
    vision = components.prepare_for_images(config, players is not None)
    if components.strategy.is_main:
        components.strategy.launch.post(_SHOWS_IMAGES, "no" if vision is None else "yes")
    asynchronous = config.orchestrator
    is_async, tasks = _is_async(config, players), TaskPlayers.of(config, players)
    leave: Leave = asynchronous.running_requests if is_async else "abandon"
    parts = replace(_parts(components, actor_config, leave), vision=vision)
    if not is_async:
        return PromptSource(config, components, None if players is None else players.make(parts))
    sampler = tasks.make(parts)
    held_out = PromptSource(config, components, sampler)
    engines = Engines(held_out, sampler, held_out.with_weights)
    run = components.strategy, components.actor, components.maker.hooks, engines
    return async_source(config, *run, components.scorer, components.data.prompts, tasks)


def _parts(components: PPOComponents, actor_config: PreTrainedConfig, leave: Leave) -> SamplerParts:
    """What a sampler of a kind of its own works with."""
    engine, strategy = components.engine, components.strategy
    assert engine is not None
    tokenizer, has_rewards = components.tokenizer, components.scorer is not None
    eos, longest = eos_token_ids(components.actor.module.model, tokenizer), components.data.longest
    given = engine, tokenizer, eos, strategy.comm, components.stop, longest
    return SamplerParts(*given, context_length(actor_config), has_rewards, leave)


def _spare(estimate: Estimate | None) -> int:
    """Bytes of the device that an estimate leaves free, but for a tenth of all."""
    return (
        0
        if estimate is None
        else estimate.machine.room * 9 // 10 - estimate.phases[estimate.largest]
    )
