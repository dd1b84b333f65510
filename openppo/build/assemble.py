"""Last phase: the parts of a run become a trainer, which resumes where a checkpoint was found."""

from collections.abc import Sequence
from functools import partial

from openppo.build.check import Checked
from openppo.build.data import LoadedData
from openppo.build.engine import Sampling
from openppo.build.memory.shortage import explain_shortage
from openppo.build.models import Models
from openppo.build.rewards import Rewards
from openppo.build.rollout_source import make_rollout_source
from openppo.build.summary import log_ppo_start
from openppo.build.trackers import start_ppo_trackers
from openppo.config import TrainPPOConfig
from openppo.experience.hooks import Hooks
from openppo.experience.maker import ExperienceMaker
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.models.pretrained import pad_token_id
from openppo.strategy.ema import ParameterAverage
from openppo.tracking import PhaseTimer, StepProfiler, Tracker, Trackers
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import CriticStep
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.supervised.batches import packed_row_length
from openppo.trainer.update import OnePassUpdate
from openppo.types import StopCheck

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


def assemble(
    checked: Checked,
    data: LoadedData,
    rewards: Rewards,
    models: Models,
    sampling: Sampling,
    callbacks: Sequence[Callback],
    trackers: Sequence[Tracker],
) -> PPOTrainer:
    """Make the trainer, load the checkpoint if one was found, and log the start."""
    config = checked.config
    components = _components(
        checked, data, rewards, models=models, sampling=sampling, own_trackers=trackers
    )
    source = checked.source
    if source is None:
        assert rewards.tasks is not None, "a run without a source has tasks"
        source = make_rollout_source(config, components, rewards.tasks, sampling=sampling)
    if config.run.stop_when:
        callbacks = [*callbacks, StopWhen(config.run.stop_conditions)]

    trainer = PPOTrainer(config, components, source, callbacks=callbacks)
    data.checkpointer.begin(trainer.load_checkpoint)
    log_ppo_start(config, components, data.plan)
    return trainer


def _components(
    checked: Checked,
    data: LoadedData,
    rewards: Rewards,
    models: Models,
    sampling: Sampling,
    own_trackers: Sequence[Tracker],
) -> PPOComponents:
    """Make the parts of the trainer."""
    config = checked.config
    strategy = checked.strategy
    critic_step = None
    if models.critic is not None:
        critic_step = CriticStep(models.critic, config, strategy.comm, device=strategy.device)

    ema = None
    if config.ppo.ema_beta is not None:
        spare = 0 if data.estimate is None else data.estimate.spare
        ema = ParameterAverage(models.actor, config.ppo.ema_beta, spare)
    data.checkpointer.attach({"actor": models.actor, "critic": models.critic}, ema)
    with strategy.uncompiled():
        pack_documents_to = packed_row_length(
            models.actor,
            data.run_data.documents,
            data.run_data.longest,
            device=strategy.device,
        )

    maker = _experience_maker(checked, data, models, stop=sampling.stop)
    return PPOComponents(
        strategy=strategy,
        tokenizer=checked.tokenizer,
        actor=models.actor,
        critic_step=critic_step,
        maker=maker,
        engine=sampling.engine,
        replay_buffer=_replay_buffer(config, maker),
        data=rewards.run_data,
        trackers=_start_trackers(checked, data, own_trackers),
        grading=Grading.of(
            strategy.comm, config.eval_rewards, config.evaluation, scorer=rewards.held_out
        ),
        ema=ema,
        pack_documents_to=pack_documents_to,
        checkpointer=data.checkpointer,
        card=data.card,
        stop=sampling.stop,
        explain_memory=partial(explain_shortage, data.estimate),
    )


def _experience_maker(
    checked: Checked,
    data: LoadedData,
    models: Models,
    stop: StopCheck,
) -> ExperienceMaker:
    """Make the experience maker."""
    config = checked.config
    strategy = checked.strategy
    profiler = StepProfiler(config.run.save_path, config.tracking, strategy.comm.rank)
    peaks = None if data.estimate is None else data.estimate.peaks
    hooks = Hooks(
        timer=PhaseTimer(profiler.phase, peaks),
        stop=stop,
        uncompiled=strategy.uncompiled,
        sources=data.run_data.source_names,
        sampled_ids=models.sampled_ids,
        resolved=models.resolved,
    )

    return ExperienceMaker(
        actor=models.actor,
        critic=models.critic,
        reference=models.reference,
        config=config,
        comm=strategy.comm,
        device=strategy.device,
        pad_token_id=pad_token_id(checked.tokenizer),
        hooks=hooks,
        values_in_training=models.critic is not None and OnePassUpdate.is_exact(config),
    )


def _replay_buffer(config: TrainPPOConfig, maker: ExperienceMaker) -> ReplayBuffer:
    """Make the empty replay buffer of this rank."""
    return ReplayBuffer(
        maker.comm,
        zero_stage=config.deepspeed.zero_stage,
        normalizes=maker.estimator.normalizes(config.advantage.normalize_advantages),
        shares_prompts=maker.resolved.shares_prompts,
    )


def _start_trackers(
    checked: Checked, data: LoadedData, own_trackers: Sequence[Tracker]
) -> Trackers:
    """Start the trackers of the run; those of the caller on rank 0."""
    return start_ppo_trackers(
        checked.config,
        checked.strategy,
        HEADLINE,
        total_steps=data.plan.n_steps,
        found_step=data.checkpointer.found_step,
        own_trackers=own_trackers,
        resolved=data.resolved,
    )
