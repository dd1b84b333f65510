"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.experience.maker import ExperienceMaker, Hooks, forward_size
from openppo.models.actor import Actor
from openppo.models.adapters import AdapterOffReference
from openppo.models.loading import model_error_context
from openppo.models.pretrained import base_model_of, known_eos_token_ids, pad_token_id
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression
from openppo.rewards.build import ScorerSetup, build_scorer, check_sources
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine, VLLMOptions
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.signals import SignalStop
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import PhaseTimer, step_tracer
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import CriticStep, CriticUpdate, OnePassCritic
from openppo.trainer.data import PPOData, check_contexts, check_models, critic_start, load_ppo_data, longest_sequence
from openppo.trainer.engine_check import check_engines, check_hf_engine
from openppo.trainer.evaluation import Grading
from openppo.trainer.memory import log_ppo_memory
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.resume.compatible import model_fingerprint, prompts_fingerprint
from openppo.trainer.source import PromptSource
from openppo.trainer.startup import check_options, start_trackers
from openppo.trainer.summary import BatchPlan, batch_plan, log_ppo_start
from openppo.trainer.supervised.batches import pack_where_exact, packed_row_length
from openppo.types import Prompt, RolloutSource, StopCheck

logger = logging.getLogger("openppo")

HEADLINE = (
    "reward",
    "kl",
    "clip_fraction",
    "value_loss",
    "entropy",
    "response_length",
    "eval_reward",
    "eval_pass@1",
    "time/step_s",
)
"""Metrics that the console shows."""


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | None = None,
) -> PPOTrainer:
    """A trainer ready for ``fit()`` or ``step()``. ``ValueError`` names the flag of whatever cannot work.

    ``source`` makes trajectories in place of responses to ``--prompt_data``.
    """
    strategy = strategy or DeepspeedStrategy(config.deepspeed)
    check_options(config, strategy.comm, own_source=source is not None)
    tokenizer, actor_config, critic = check_models(config, strategy, samples=source is None)
    data = load_ppo_data(config, tokenizer, actor_config, strategy.comm, prompts=source is None)
    check_contexts(config, data, critic)
    setup = _scorer_setup(config, strategy, [*data.prompts, *data.held_out])
    if config.run.dry_run and source is None:
        check_sources(config.rewards, tokenizer, setup)
    estimate = log_ppo_memory(config, data, critic, strategy) if source is None or config.run.dry_run else None
    plan = batch_plan(config, len(data.prompts), strategy.comm.world_size, source_steps(config, source))
    checkpointer = Checkpointer(config, strategy, "ppo", _contents(config, data))
    scorer = build_scorer(config.rewards, tokenizer, setup) if source is None else None  # before the large models
    trained = _prepare_models(config, strategy, plan, critic, samples=source is None)
    traced = step_tracer(config.run.save_path, config.tracking, strategy.comm.rank)
    timer = PhaseTimer(traced, estimate.peaks if estimate else None)
    hooks = Hooks(timer, SignalStop(strategy.comm), strategy.uncompiled)
    engine = _engine(config, strategy, trained.actor, tokenizer, hooks.stop, actor_config) if source is None else None
    strategy.seed_per_rank()  # after the engine: vLLM seeds everything too
    ema = ParameterAverage(trained.actor, config.ppo.ema_beta) if config.ppo.enable_ema else None
    checkpointer.attach({"actor": trained.actor, "critic": trained.critic}, ema)
    maker, critic_update = _maker(config, strategy, trained, pad_token_id(tokenizer), hooks)
    components = PPOComponents(
        strategy=strategy,
        tokenizer=tokenizer,
        actor=trained.actor,
        critic=trained.critic,
        critic_update=critic_update,
        maker=maker,
        engine=engine,
        scorer=scorer,
        prompts=data.prompts,
        held_out=data.held_out,
        documents=data.documents,
        trackers=start_trackers(config, strategy, HEADLINE, plan.n_steps, checkpointer.found_step),
        grading=_grading(config, strategy),
        ema=ema,
        pack_documents_to=_packed_row_length(trained.actor, data, strategy),
        checkpointer=checkpointer,
        stop=hooks.stop,
        estimate=estimate,
    )
    source = source or PromptSource(config, components)
    trainer = PPOTrainer(config, components, source, [*callbacks, *_stopping(config)])
    if checkpointer.found is not None:
        trainer.load_checkpoint()
    else:
        checkpointer.set_aside_earlier()
    log_ppo_start(config, components, plan, critic="" if critic is None else critic[1], done=trainer.global_step)
    return trainer


def source_steps(config: TrainPPOConfig, source: RolloutSource | None) -> int | None:
    """Global steps of a source of the caller's; None for the one that passes over ``--prompt_data``."""
    if source is None:
        return None
    steps = config.ppo.max_steps if source.steps is None else source.steps
    if steps is None:
        raise ValueError("--max_steps is missing: the source of trajectories does not say how many steps it has.")
    if steps < 1:
        raise ValueError(f"The source of trajectories has {steps} steps: give it at least one.")
    return steps


def _maker(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, models: _Models, pad: int, hooks: Hooks
) -> tuple[ExperienceMaker, CriticUpdate | None]:
    """The maker of experience; where it also trains the critic, what takes the critic's optimizer steps."""
    comm, device = strategy.comm, strategy.device
    arguments = models.actor, models.critic, models.reference, config, comm, device, pad, hooks
    if models.critic is None or not OnePassCritic.is_exact(config):
        return ExperienceMaker(*arguments), None
    one_pass = OnePassCritic(CriticStep(models.critic, config, comm, device), *arguments)
    return one_pass, one_pass


def _engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM."""
    policy: Any = actor.module.model
    eos, generation, model = known_eos_token_ids(policy, tokenizer), config.generation, config.model
    if generation.rollout_engine == "vllm":
        options = VLLMOptions(
            bf16=config.deepspeed.bf16,
            max_tokens=longest_sequence(config, actor_config),
            memory_share=generation.vllm_gpu_memory_utilization,
            seed=config.deepspeed.seed,
            trust_remote_code=model.trust_remote_code,
            max_rows=generation.max_num_seqs,
        )
        vllm = VLLMEngine(base_model_of(model.pretrain), options, eos, show_progress=strategy.is_main, stop=stop)
        vllm.decode = decoder(tokenizer)
        if generation.engine_check == "on":
            check_engines(config, strategy, actor, {"": vllm})
        return vllm
    in_lockstep = not strategy.fits_gathered(actor, config.ppo.offload_idle)
    if generation.cuda_graphs and in_lockstep:
        logger.warning("--cuda_graphs: ranks that generate in lockstep cannot replay steps; they are launched as usual")
    engine = HFEngine(
        policy,
        eos,
        pad_token_id(tokenizer),
        generation.max_num_seqs,
        any_rank_busy=strategy.any_rank if in_lockstep else None,
        show_progress=strategy.is_main,
        stop=stop,
        new_recorder=CUDARecorder if generation.cuda_graphs and not in_lockstep else None,
    )
    engine.decode = decoder(tokenizer)
    return engine


def _packed_row_length(actor: TrainableModel, data: PPOData, strategy: DeepspeedStrategy) -> int | None:
    with strategy.uncompiled():
        return packed_row_length(actor, data.documents, data.longest, strategy.device)


def _contents(config: TrainPPOConfig, data: PPOData) -> dict[str, str]:
    """Fingerprints of what a checkpoint must have been made with."""
    contents = {flag: model_fingerprint(name) for flag, name in config.input_models.items() if name is not None}
    if data.prompts:
        contents["--prompt_data"] = prompts_fingerprint(data.prompts)
    if data.documents:
        contents["--pretrain_data"] = data.fingerprint
    return contents


class _Models(NamedTuple):
    """The models that training runs; ``critic`` and ``reference`` may be absent."""

    actor: TrainableModel
    critic: TrainableModel | None
    reference: Callable[..., Any] | None


def _prepare_models(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    plan: BatchPlan,
    critic: tuple[str, str] | None,
    samples: bool,
) -> _Models:
    """Load and wrap one model after the other; no ``critic`` for estimators without, no reference without a penalty.

    Only a run that ``samples`` needs an engine, and its check.
    """
    model, rates = config.model, config.learning_rate
    trained_critic = None
    if critic is not None:
        module = load_critic(config)
        trained_critic = strategy.prepare(module, config.adam, rates.critic_learning_rate, plan.optimizer_steps())
        _pack(config, strategy, module, trained_critic, "critic")
    n_steps = plan.optimizer_steps(without=config.ppo.frozen_actor_steps)
    policy = load_actor(config)
    actor = strategy.prepare(policy, config.adam, rates.actor_learning_rate, n_steps)
    _pack(config, strategy, policy, actor, "actor")
    if samples and config.generation.engine_check == "on" and config.generation.rollout_engine == "hf":
        check_hf_engine(config, strategy, actor)
    if config.kl.init_kl_coef == 0:
        return _Models(actor, trained_critic, None)
    if config.lora.lora_rank > 0 and model.ref_pretrain is None:
        return _Models(actor, trained_critic, AdapterOffReference(actor))
    flag, name = (
        ("--pretrain", model.pretrain) if model.ref_pretrain is None else ("--ref_pretrain", model.ref_pretrain)
    )
    with model_error_context(flag, name, "reference"):
        frozen = Actor(name, temperature=config.generation.temperature, **_loading(config))
    reference = strategy.prepare_frozen(frozen)
    _pack(config, strategy, frozen, reference, "reference")
    return _Models(actor, trained_critic, reference)


def load_actor(config: TrainPPOConfig) -> Actor:
    """The policy before training, on the host."""
    name = config.model.pretrain
    with model_error_context("--pretrain", name, "actor"):
        return Actor(name, temperature=config.generation.temperature, **_loading(config), **vars(config.lora))


def load_critic(config: TrainPPOConfig) -> ScalarHeadModel:
    """The critic before training, on the host."""
    (flag, name), prefix = critic_start(config), config.model.value_head_prefix
    lora = vars(_critic_lora(config))
    with model_error_context(flag, name, "critic"):
        return get_llm_for_sequence_regression(name, "critic", value_head_prefix=prefix, **_loading(config), **lora)


def _loading(config: TrainPPOConfig) -> dict[str, bool]:
    return {
        "bf16": config.deepspeed.bf16,
        "flash_attn": config.model.flash_attn,
        "trust_remote_code": config.model.trust_remote_code,
    }


def _pack(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, module: Actor | ScalarHeadModel, forward: Any, name: str
) -> None:
    """With FlashAttention samples need no padding."""
    if config.model.flash_attn:
        with strategy.uncompiled():
            pack_where_exact(module, forward, strategy.device, name)


def _critic_lora(config: TrainPPOConfig) -> LoRAConfig:
    rank = config.lora.lora_rank if config.model.critic_lora_rank is None else config.model.critic_lora_rank
    return dataclasses.replace(config.lora, lora_rank=rank, load_in_4bit=config.lora.load_in_4bit and rank > 0)


def _stopping(config: TrainPPOConfig) -> list[Callback]:
    return [StopWhen(config.run.stop_conditions)] if config.run.stop_when else []


def _scorer_setup(config: TrainPPOConfig, strategy: DeepspeedStrategy, prompts: list[Prompt]) -> ScorerSetup:
    shaping = config.shaping
    return ScorerSetup(
        comm=strategy.comm,
        device=strategy.device,
        prepare_frozen=strategy.prepare_frozen,
        prompts=prompts,
        actor=config.model.pretrain,
        size=forward_size(config),
        bf16=config.deepspeed.bf16,
        flash_attn=config.model.flash_attn,
        value_head_prefix=config.model.value_head_prefix,
        normalize=shaping.normalize_reward and shaping.reward_normalizer == "model",
        input_template=config.data.input_template,
        trust_remote_code=config.model.trust_remote_code,
        pack_where_exact=pack_where_exact if config.model.flash_attn else None,
    )


def _grading(config: TrainPPOConfig, strategy: DeepspeedStrategy) -> Grading:
    """How responses to held-out prompts are measured."""
    passing = config.rewards.pass_threshold(config.evaluation.pass_reward)
    return Grading(strategy.comm, passing, config.rewards.weights())
