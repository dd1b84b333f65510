"""From options to a PPO trainer: check everything cheap first, then load, wrap and put together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import LoRAConfig, TrainPPOConfig
from openppo.experience.estimators import ESTIMATORS, check_estimator
from openppo.experience.maker import ExperienceMaker, forward_size
from openppo.models.actor import Actor
from openppo.models.adapters import AdapterOffReference, refuse_stacked_adapters
from openppo.models.loading import load_options, model_error_context
from openppo.models.pretrained import base_model_of, check_model, context_length, known_eos_token_ids, pad_token_id
from openppo.models.scalar_head import ScalarHeadModel, get_llm_for_sequence_regression
from openppo.rewards.build import ScorerSetup, build_scorer, check_sources, own_tokenizer
from openppo.rollout.decode_graphs import CUDARecorder, check_layers
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.row_cache import check_cache
from openppo.rollout.vllm_engine import VLLMEngine, VLLMOptions, check_vllm
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage
from openppo.strategy.gpu import check_transformers
from openppo.strategy.trainable_model import TrainableModel
from openppo.trainer.batches import pack_where_exact, packed_row_length
from openppo.trainer.callbacks import Callback, StopWhen
from openppo.trainer.components import PPOComponents
from openppo.trainer.engine_check import LONGEST, check_engines, check_hf_engine
from openppo.trainer.evaluation import Evaluator
from openppo.trainer.memory import log_ppo_memory
from openppo.trainer.ppo_data import PPOData, load_ppo_data
from openppo.trainer.ppo_trainer import HEADLINE, PPOTrainer
from openppo.trainer.resume.checkpointer import Checkpointer
from openppo.trainer.resume.compatible import model_fingerprint, prompts_fingerprint
from openppo.trainer.resume.stop import SignalStop
from openppo.trainer.startup import (
    check_context,
    check_options,
    check_same,
    load_policy_tokenizer,
    on_all_ranks,
    start_trackers,
)
from openppo.trainer.steps.update_step import frozen_actor_steps
from openppo.trainer.summary import BatchPlan, batch_plan, log_ppo_start
from openppo.types import Prompt, SamplingParams, StopCheck

logger = logging.getLogger("openppo")


def build_ppo_trainer(
    config: TrainPPOConfig, strategy: DeepspeedStrategy | None = None, callbacks: Sequence[Callback] = ()
) -> PPOTrainer:
    """A trainer ready for ``fit()`` or ``step()``. ``ValueError`` names the flag of whatever cannot work."""
    strategy = strategy or DeepspeedStrategy(config.deepspeed)
    check_options(config, strategy.comm)
    _check_algorithm(config)
    model = config.model
    actor_config = on_all_ranks(
        strategy.comm, lambda: check_model(model.pretrain, "--pretrain", model.trust_remote_code)
    )
    _check_lora(config)
    load_options(config.deepspeed.bf16, model.flash_attn, config.lora.load_in_4bit)  # what they need is installed
    _check_gpu_options(config, actor_config, strategy)
    _check_engine(config, actor_config, strategy)
    tokenizer = load_policy_tokenizer(model.pretrain, model.trust_remote_code, config.data.chat_template_kwargs)
    _check_vocabularies(config, tokenizer)
    data = load_ppo_data(config, tokenizer, actor_config, strategy.comm)
    _check_contexts(config, data)
    setup = _scorer_setup(config, strategy, [*data.prompts, *data.held_out])
    if config.run.dry_run:
        check_sources(config.rewards, tokenizer, setup)
    uses_critic = ESTIMATORS[config.advantage.advantage_estimator].uses_critic
    estimate = log_ppo_memory(config, data, critic_start(config) if uses_critic else None, strategy)
    checkpointer = Checkpointer(config, strategy, "ppo", _contents(config, data))
    scorer = build_scorer(config.rewards, tokenizer, setup)  # before the large models: a missing head shows at once
    plan = batch_plan(config, len(data.prompts), strategy.comm.world_size)
    actor, critic, reference = _prepare_models(config, strategy, plan)
    comm, pad, stop = strategy.comm, pad_token_id(tokenizer), SignalStop(strategy.comm)
    engine = _engine(config, strategy, actor, tokenizer, stop, _longest_sequence(config, actor_config))
    strategy.seed_per_rank()  # after the engine: vLLM seeds everything too

    ema = ParameterAverage(actor, config.ppo.ema_beta) if config.ppo.enable_ema else None
    checkpointer.attach({"actor": actor, "critic": critic}, ema)
    parts = PPOComponents(
        strategy=strategy,
        tokenizer=tokenizer,
        actor=actor,
        critic=critic,
        engine=engine,
        scorer=scorer,
        maker=ExperienceMaker(actor, critic, reference, config, comm, strategy.device, pad, stop),
        prompts=data.prompts,
        documents=data.documents,
        trackers=start_trackers(config, strategy, HEADLINE, plan.n_steps, checkpointer.found_step),
        ema=ema,
        evaluator=_evaluator(config, strategy, engine, scorer, data.held_out),
        pack_documents_to=_packed_row_length(actor, data, strategy),
        checkpointer=checkpointer,
        stop=stop,
        estimate=estimate,
    )
    trainer = PPOTrainer(config, parts, [*callbacks, *_stopping(config)])
    if checkpointer.found is not None:
        trainer.load_checkpoint()
    else:
        checkpointer.set_aside_earlier()
    log_ppo_start(config, parts, plan, critic=critic_start(config)[1], done=trainer.global_step)
    return trainer


def _engine(
    config: TrainPPOConfig,
    strategy: DeepspeedStrategy,
    actor: TrainableModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: StopCheck,
    max_tokens: int,
) -> Engine:
    """Samples with the actor's own module, or a copy of it in vLLM."""
    policy: Any = actor.module.model
    eos, generation, model = known_eos_token_ids(policy, tokenizer), config.generation, config.model
    if generation.rollout_engine == "vllm":
        options = VLLMOptions(
            bf16=config.deepspeed.bf16,
            max_tokens=max_tokens,
            memory_share=generation.vllm_gpu_memory_utilization,
            seed=config.deepspeed.seed,
            trust_remote_code=model.trust_remote_code,
            max_rows=generation.max_num_seqs,
        )
        vllm = VLLMEngine(base_model_of(model.pretrain), options, eos, show_progress=strategy.is_main, stop=stop)
        if generation.engine_check == "on":
            check_engines(config, strategy, actor, {"": vllm})
        return vllm
    in_lockstep = not strategy.fits_gathered(actor, config.ppo.offload_idle)
    if generation.cuda_graphs and in_lockstep:
        logger.warning("--cuda_graphs: ranks that generate in lockstep cannot replay steps; they are launched as usual")
    return HFEngine(
        policy,
        eos,
        pad_token_id(tokenizer),
        generation.max_num_seqs,
        any_rank_busy=strategy.any_rank if in_lockstep else None,
        show_progress=strategy.is_main,
        stop=stop,
        new_recorder=CUDARecorder if generation.cuda_graphs and not in_lockstep else None,
    )


def _packed_row_length(actor: TrainableModel, data: PPOData, strategy: DeepspeedStrategy) -> int | None:
    with strategy.uncompiled():
        return packed_row_length(actor, data.documents, data.longest, strategy.device)


def _check_lora(config: TrainPPOConfig) -> None:
    """Before other models are loaded, which takes long."""
    if config.lora.lora_rank > 0:
        try:
            refuse_stacked_adapters(config.model.pretrain)
        except ValueError as error:
            raise ValueError(f"--pretrain {error}") from error


def _check_engine(config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy) -> None:
    if config.generation.rollout_engine == "vllm":
        on_all_ranks(strategy.comm, check_vllm)
    else:
        check_cache(actor_config)
        check_transformers()


def _check_gpu_options(config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy) -> None:
    here = strategy.device.type == "cuda" or config.run.dry_run  # which may be about another machine
    if config.generation.cuda_graphs:
        if not here:
            raise ValueError("--cuda_graphs records steps on a GPU, and this run is on a CPU: leave it out.")
        check_layers(actor_config)
    if config.ppo.offload_idle and not here and strategy.is_main:
        logger.warning("--offload_idle: there is no GPU whose memory it would save, it only takes time")


def _longest_sequence(config: TrainPPOConfig, actor_config: PreTrainedConfig) -> int:
    """Largest number of tokens of a prompt with its response."""
    wanted = max(config.data.prompt_max_len + config.generation.generate_max_len, LONGEST)
    context = context_length(actor_config)
    return wanted if context is None else min(wanted, context)


def _contents(config: TrainPPOConfig, data: PPOData) -> dict[str, str]:
    """Fingerprints of what a checkpoint must have been made with."""
    contents = {flag: model_fingerprint(name) for flag, name in config.input_models.items() if name is not None}
    contents["--prompt_data"] = prompts_fingerprint(data.prompts)
    if data.documents:
        contents["--pretrain_data"] = data.fingerprint
    return contents


def _check_algorithm(config: TrainPPOConfig) -> None:
    """Pairs of options of which one depends on the estimator."""
    name = config.advantage.advantage_estimator
    check_estimator(name, config.ppo.n_samples_per_prompt)
    if ESTIMATORS[name].uses_critic:
        return
    for flag, given in (
        ("--freezing_actor_steps", config.ppo.freezing_actor_steps > 0),
        ("--value_pretrain_steps", config.ppo.value_pretrain_steps > 0),
        ("--save_value_network", config.model.save_value_network),
        ("--critic_pretrain", config.model.critic_pretrain is not None),
        ("--critic_lora_rank", config.model.critic_lora_rank is not None),
        ("--lambd_critic", config.advantage.lambd_critic is not None),
        ("--adaptive_lambd_alpha", config.advantage.adaptive_lambd_alpha is not None),
    ):
        if given:
            raise ValueError(f"{flag} is about a critic, and --advantage_estimator {name} has none: leave it out.")


def _prepare_models(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, plan: BatchPlan
) -> tuple[TrainableModel, TrainableModel | None, Callable[..., Any] | None]:
    """Actor, critic (None for estimators without one) and reference (None without a KL penalty).

    Each is loaded and wrapped before the next is loaded.
    """
    model, rates = config.model, config.learning_rate
    critic = None
    if ESTIMATORS[config.advantage.advantage_estimator].uses_critic:
        module = load_critic(config)
        critic = strategy.prepare(module, config.adam, rates.critic_learning_rate, plan.optimizer_steps())
        _pack(config, strategy, module, critic, "critic")
    n_steps = plan.optimizer_steps(without=frozen_actor_steps(config))
    policy = load_actor(config)
    actor = strategy.prepare(policy, config.adam, rates.actor_learning_rate, n_steps)
    _pack(config, strategy, policy, actor, "actor")
    if config.generation.engine_check == "on" and config.generation.rollout_engine == "hf":
        check_hf_engine(config, strategy, actor)
    if config.kl.init_kl_coef == 0:
        return actor, critic, None
    if config.lora.lora_rank > 0 and model.ref_pretrain is None:
        return actor, critic, AdapterOffReference(actor)
    flag, name = (
        ("--pretrain", model.pretrain) if model.ref_pretrain is None else ("--ref_pretrain", model.ref_pretrain)
    )
    with model_error_context(flag, name, "reference"):
        frozen = Actor(name, temperature=config.generation.temperature, **_loading(config))
    reference = strategy.prepare_frozen(frozen)
    _pack(config, strategy, frozen, reference, "reference")
    return actor, critic, reference


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


def critic_start(config: TrainPPOConfig) -> tuple[str, str]:
    """Flag and name of the model that the critic starts from."""
    starts = (
        ("--critic_pretrain", config.model.critic_pretrain),
        ("--reward_pretrain", config.rewards.reward_pretrain),
    )
    return next(((flag, name) for flag, name in starts if name), ("--pretrain", config.model.pretrain))


def _stopping(config: TrainPPOConfig) -> list[Callback]:
    return [StopWhen(config.run.stop_conditions)] if config.run.stop_when else []


def _check_vocabularies(config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a critic or reference with another vocabulary than the actor."""
    critic = (
        critic_start(config) if ESTIMATORS[config.advantage.advantage_estimator].uses_critic else ("--pretrain", "")
    )
    trust = config.model.trust_remote_code
    for flag, name, role in ((*critic, "a critic"), ("--ref_pretrain", config.model.ref_pretrain, "a reference")):
        if name is None or flag == "--pretrain":
            continue
        check_model(name, flag, trust)
        if own_tokenizer(flag, name, config.model.pretrain, tokenizer, trust) is not None:
            remedy = (
                "name another with --critic_pretrain" if flag == "--reward_pretrain" else "use one of the same family"
            )
            raise ValueError(
                f"{flag} {name} has another vocabulary than --pretrain {config.model.pretrain}, and as {role} it would "
                f"read token ids that are not its own: {remedy}."
            )


def _check_contexts(config: TrainPPOConfig, data: PPOData) -> None:
    """Refuse sequences beyond the context of critic or reference."""
    new_tokens = config.generation.generate_max_len
    critic = (
        critic_start(config) if ESTIMATORS[config.advantage.advantage_estimator].uses_critic else ("--pretrain", "")
    )
    for flag, name in (critic, ("--ref_pretrain", config.model.ref_pretrain)):
        if name is not None and flag != "--pretrain":
            model_config = check_model(name, flag, config.model.trust_remote_code)
            check_context(model_config, f"{flag} {name}", data.longest - new_tokens, new_tokens)


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
        collective=partial(on_all_ranks, strategy.comm),
        check_same=partial(check_same, strategy.comm),
        pack_where_exact=pack_where_exact if config.model.flash_attn else None,
    )


def _evaluator(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, engine: Engine, scorer: Any, held_out: list[Prompt]
) -> Evaluator | None:
    if not held_out:
        return None
    options, generation = config.evaluation, config.generation
    greedy = options.eval_temperature == 0
    params = SamplingParams(
        generation.generate_max_len,
        options.eval_temperature,
        1.0 if greedy else generation.top_p,
        None if greedy else generation.top_k,
    )
    return Evaluator(
        engine,
        scorer,
        strategy.comm,
        held_out,
        params,
        options.eval_n_samples_per_prompt,
        config.rewards.pass_threshold(options.pass_reward),
        config.rewards.weights(),
        config.deepspeed.seed,
    )
