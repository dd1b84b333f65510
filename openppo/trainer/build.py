"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.experience.maker import ExperienceMaker, Hooks, forward_size
from openppo.models.actor import Actor
from openppo.models.adapters import AdapterOffReference
from openppo.models.loading import model_error_context
from openppo.models.padding import pack_where_exact
from openppo.models.pretrained import base_model_of, context_length, eos_token_ids, pad_token_id
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression
from openppo.rewards.build import ScorerSetup
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.rollout import SamplerMaker, SamplerParts
from openppo.rollout.sampling import decoder
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.signals import SignalStop
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import PhaseTimer, StepProfiler
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import CriticStep, OnePassCritic
from openppo.trainer.data import PPOData, check_models, critic_lora, critic_start, load_ppo_data
from openppo.trainer.engine_check import LONGEST, REQUESTS, check_engines
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.memory import log_ppo_memory
from openppo.trainer.ppo import PPOTrainer
from openppo.trainer.source import PromptSource
from openppo.trainer.startup import check_options, start_trackers
from openppo.trainer.summary import batch_plan, log_ppo_start
from openppo.trainer.supervised.batches import packed_row_length
from openppo.types import RolloutSource, StopCheck

HEADLINE = "reward kl clip_fraction value_loss entropy response_length eval_reward eval_pass@1 time/step_s".split()
"""Metrics that the console shows."""


def build_ppo_trainer(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy | None = None,
    callbacks: Sequence[Callback] = (),
    source: RolloutSource | SamplerMaker | None = None,
) -> PPOTrainer:
    """A trainer; ``source`` gives trajectories, or makes them of prompts. ``ValueError`` names the flag to change."""
    maker, source = (source, None) if isinstance(source, SamplerMaker) else (None, source)
    strategy, samples = strategy or DeepspeedStrategy(config.deepspeed), source is None
    comm, device, run = strategy.comm, strategy.device, config.run
    tokenizer, actor_config, data = _checked(config, strategy, samples, maker)
    setup = _scorer_setup(config, tokenizer, strategy, data, maker is not None)
    if run.dry_run and samples:
        setup.check()
    estimate = log_ppo_memory(config, data, strategy) if samples or run.dry_run else None
    plan = batch_plan(config, comm.world_size, len(data.prompts), source)
    checkpointer = Checkpointer(config, strategy, "ppo", data.fingerprints)
    scorer = setup.build() if samples and config.rewards.names() else None  # before the large models
    critic = None if critic_start(config) is None else _prepared(config, strategy, "critic", plan.optimizer_steps())
    actor = _prepared(config, strategy, "actor", plan.optimizer_steps(without=config.ppo.frozen_actor_steps))
    reference = _reference(config, strategy, actor)
    traced = StepProfiler(run.save_path, config.tracking, comm.rank).phase
    timer = PhaseTimer(traced, estimate.peaks if estimate else None)
    hooks = Hooks(timer, SignalStop(comm), strategy.uncompiled)
    engine = _engine(config, strategy, actor, tokenizer, hooks.stop, actor_config) if samples else None
    strategy.seed_per_rank()  # after the engine: vLLM seeds everything too
    ema = ParameterAverage(actor, config.ppo.ema_beta) if config.ppo.enable_ema else None
    checkpointer.attach({"actor": actor, "critic": critic}, ema)
    with strategy.uncompiled():
        pack_documents_to = packed_row_length(actor, data.documents, data.longest, device)
    critic_step = None if critic is None else CriticStep(critic, config, comm, device)
    one_pass: Any = partial(OnePassCritic, critic_step) if critic_step and OnePassCritic.is_exact(config) else None
    make = one_pass or ExperienceMaker
    components = PPOComponents(
        strategy=strategy,
        tokenizer=tokenizer,
        actor=actor,
        critic_step=critic_step,
        maker=make(actor, critic, reference, config, comm, device, pad_token_id(tokenizer), hooks),
        engine=engine,
        scorer=scorer,
        data=data,
        trackers=start_trackers(config, strategy, HEADLINE, plan.n_steps, checkpointer.found_step),
        grading=Grading(comm, config.rewards.pass_threshold(config.evaluation.pass_reward), config.rewards.weights()),
        ema=ema,
        pack_documents_to=pack_documents_to,
        checkpointer=checkpointer,
        stop=hooks.stop,
        estimate=estimate,
    )
    callbacks = [*callbacks, StopWhen(run.stop_conditions)] if run.stop_when else callbacks
    sampler = None if maker is None else maker.make(_parts(components, actor_config))
    trainer = PPOTrainer(config, components, source or PromptSource(config, components, sampler), callbacks)
    checkpointer.begin(trainer.load_checkpoint)
    log_ppo_start(config, components, plan)
    return trainer


def _checked(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, samples: bool, maker: SamplerMaker | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig, PPOData]:
    """Tokenizer, the actor's config, and data, once everything has been checked that needs no weights."""
    if samples and maker is None and config.agents.form is not None:
        raise ValueError(f"--{config.agents.form}: pass source=agent_source(config.agents), of openppo.agents.")
    own_rewards = None if maker is None else maker.gives_rewards
    check_options(config, strategy.comm, own_source=not samples, own_rewards=own_rewards)
    tokenizer, actor_config = check_models(config, strategy, samples)
    if maker is not None:
        maker.check(tokenizer)
    return tokenizer, actor_config, load_ppo_data(config, tokenizer, actor_config, strategy.comm, samples, maker)


def _parts(components: PPOComponents, actor_config: PreTrainedConfig) -> SamplerParts:
    """What a sampler of a kind of its own works with."""
    engine, strategy = components.engine, components.strategy
    assert engine is not None
    return SamplerParts(
        engine,
        components.tokenizer,
        eos_token_ids(components.actor.module.model, components.tokenizer),
        strategy.comm,
        components.stop,
        components.data.longest,
        context_length(actor_config),
        strategy.any_rank if engine.in_lockstep else None,
        components.scorer is not None,
    )


def _scorer_setup(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    strategy: DeepspeedStrategy,
    data: PPOData,
    episodes: bool,
) -> ScorerSetup:
    model, shaping = config.model, config.shaping
    return ScorerSetup(
        config.rewards,
        tokenizer,
        comm=strategy.comm,
        device=strategy.device,
        prepare_frozen=strategy.prepare_frozen,
        prompts=[*data.prompts, *data.held_out],
        actor=model.pretrain,
        size=forward_size(config),
        loading=_loading(config),
        value_head_prefix=model.value_head_prefix,
        normalize=shaping.normalize_reward and shaping.reward_normalizer == "model",
        input_template=config.data.input_template,
        episodes=episodes,
    )


def load_actor(config: TrainPPOConfig, reference: bool = False) -> Actor:
    """The policy before training, or the ``reference`` where that is a model of its own, on the host."""
    model, lora, flag, name = config.model, {} if reference else vars(config.lora), "--pretrain", config.model.pretrain
    if reference and model.ref_pretrain is not None:
        flag, name = "--ref_pretrain", model.ref_pretrain
    with model_error_context(flag, name, "reference" if reference else "actor"):
        return Actor(name, temperature=config.generation.temperature, **_loading(config), **lora)


def load_critic(config: TrainPPOConfig) -> ScalarHeadModel:
    """The critic before training, on the host."""
    start = critic_start(config)
    assert start is not None, "the estimator has a critic"
    options = {"value_head_prefix": config.model.value_head_prefix, **_loading(config), **vars(critic_lora(config))}
    with model_error_context(*start, "critic"):
        return get_llm_for_sequence_regression(start[1], "critic", **options)


def _loading(config: TrainPPOConfig) -> dict[str, bool]:
    model = config.model
    options = {"flash_attn": model.flash_attn, "trust_remote_code": model.trust_remote_code}
    return options | {"bf16": config.deepspeed.bf16}


def _prepared(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, role: Literal["actor", "critic", "reference"], n_steps: int = 0
) -> Any:
    """The loaded model of ``role``, wrapped for training or as a frozen one; FlashAttention packs its rows."""
    module: Any = load_critic(config) if role == "critic" else load_actor(config, reference=role == "reference")
    if role == "reference":
        model: Any = strategy.prepare_frozen(module)
    else:
        rate = config.ppo.actor_learning_rate if role == "actor" else config.ppo.critic_learning_rate
        model = strategy.prepare(module, config.adam, rate, n_steps)
    if config.model.flash_attn:
        with strategy.uncompiled():
            pack_where_exact(module, model, strategy.device, role)
    return model


def _reference(config: TrainPPOConfig, strategy: DeepspeedStrategy, actor: TrainableModel) -> Any:
    """None without a KL penalty; of a policy with adapters that policy without them."""
    if config.kl.init_kl_coef == 0:
        return None
    shares_weights = config.lora.lora_rank > 0 and config.model.ref_pretrain is None
    return AdapterOffReference(actor) if shares_weights else _prepared(config, strategy, "reference")


def _engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    actor_config: PreTrainedConfig,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM; checked with ``--engine_check on``."""
    policy: Any = actor.module.model
    eos, generation = eos_token_ids(policy, tokenizer), config.generation
    common: dict[str, Any] = {"show_progress": strategy.is_main, "stop": stop}
    engine: VLLMEngine | HFEngine
    checked: dict[str, Engine]
    if generation.rollout_engine == "vllm":
        episode = config.agents.episode_max_len or 0
        longest = max(config.data.prompt_max_len + generation.generate_max_len, episode, LONGEST)
        max_tokens = min(longest, context_length(actor_config) or longest)
        engine = VLLMEngine(base_model_of(config.model.pretrain), config, max_tokens, eos, **common)
        checked = {"": engine}
    else:
        together = None if strategy.fits_gathered(actor, config.ppo.offload_idle) else strategy.any_rank
        recorder = CUDARecorder if generation.cuda_graphs and together is None else None
        if generation.cuda_graphs and recorder is None:
            logger.warning("--cuda_graphs: ranks in lockstep cannot replay steps; they are launched as usual")
        common |= {"any_rank_busy": together, "new_recorder": recorder}
        engine = HFEngine(policy, eos, pad_token_id(tokenizer), generation.max_num_seqs, **common)
        checked = {"": HFEngine(policy, (), 0, len(REQUESTS), together)}
        if recorder is not None:
            checked[" with --cuda_graphs"] = HFEngine(policy, (), 0, len(REQUESTS), new_recorder=recorder)
    if generation.engine_check == "on":
        check_engines(config, strategy, actor, checked)
    engine.decode = decoder(tokenizer)
    return engine
