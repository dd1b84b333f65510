"""What a PPO run reads: prompts, held-out prompts, documents; and whether models and options fit together."""

import logging
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets import ShowRows, TokenExample, load_documents, load_mixed_rows, load_prompts
from openppo.experience.estimators import ESTIMATORS, check_estimator
from openppo.models.adapters import refuse_stacked_adapters
from openppo.models.loading import load_options
from openppo.models.pretrained import check_model, check_token_ids, context_length
from openppo.rewards.build import own_tokenizer
from openppo.rollout.decode_graphs import check_layers
from openppo.rollout.row_cache import check_cache
from openppo.rollout.vllm_engine import check_vllm
from openppo.strategy.comm import check_same, check_transformers, collective
from openppo.strategy.deepspeed import DeepspeedStrategy
from openppo.trainer.engine_check import LONGEST
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.startup import check_context, load_policy_tokenizer, log_dropped, tokenizing
from openppo.types import Comm, Prompt

logger = logging.getLogger("openppo")


@dataclass(frozen=True)
class PPOData:
    """``held_out`` is empty without ``--eval_data``, ``documents`` without ``--pretrain_data``.

    ``longest`` is the most tokens that a prompt and its response can have; documents are cut there, and their
    ``fingerprint`` is of what they were before, so that a run may resume with another ``--generate_max_len``.
    """

    prompts: list[Prompt]
    held_out: list[Prompt]
    documents: list[TokenExample]
    fingerprint: str
    longest: int


def load_ppo_data(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    prompts: bool = True,
) -> PPOData:
    """Everything that the run reads, the same on all ranks; without ``prompts`` only documents.

    ``ValueError`` names the flag and the row of what cannot be used, and the ranks if only some cannot.
    """
    data = collective(comm, lambda: _load(config, tokenizer, actor_config, tokenizing(comm), prompts))
    prompt_ids, held_out = ([(p.token_ids, p.label) for p in each] for each in (data.prompts, data.held_out))
    check_same(comm, {"--prompt_data": prompt_ids, "--eval_data": held_out, "--pretrain_data": data.documents})
    return data


def _load(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    show: ShowRows,
    with_prompts: bool,
) -> PPOData:
    data, new_tokens = config.data, config.generation.generate_max_len
    prompts: list[Prompt] = []
    held_out: list[Prompt] = []
    longest = data.prompt_max_len + new_tokens
    if with_prompts:
        given = data.prompt_data, data.prompt_data_probs, data.prompt_split
        prompts = _prompts(config, tokenizer, "--prompt_data", *given, show)
        if (source := config.evaluation.eval_data) is not None:
            held_out = _prompts(config, tokenizer, "--eval_data", source, None, config.evaluation.eval_split, show)
        longest = max(len(prompt.token_ids) for prompt in [*prompts, *held_out]) + new_tokens
        check_context(actor_config, f"--pretrain {config.model.pretrain}", longest - new_tokens, new_tokens)
    documents, fingerprint = _documents(config, tokenizer, longest, show)
    rows = [prompt.token_ids for prompt in [*prompts, *held_out]] + [document.token_ids for document in documents]
    check_token_ids(actor_config, f"--pretrain {config.model.pretrain}", tokenizer, rows)
    return PPOData(prompts, held_out, documents, fingerprint, longest)


def _prompts(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    flag: str,
    source: str,
    probs: str | None,
    split: str,
    show: ShowRows,
) -> list[Prompt]:
    rows = load_mixed_rows(config.data, source, probs, flag=flag, split=split, seed=config.deepspeed.seed)
    loaded = load_prompts(rows, tokenizer, config.data, flag=flag, show=show)
    log_dropped(loaded.dropped, len(loaded.prompts), flag, "--prompt_max_len")
    return loaded.prompts


def _documents(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, max_len: int, show: ShowRows
) -> tuple[list[TokenExample], str]:
    """Documents and their fingerprint."""
    data = config.data
    if data.pretrain_data is None or config.ppo.ptx_coef == 0:
        return [], ""
    given, seed = (data.pretrain_data, data.pretrain_data_probs), config.deepspeed.seed
    rows = load_mixed_rows(data, *given, flag="--pretrain_data", split=data.pretrain_split, seed=seed)
    key = data.pretrain_key or data.input_key
    documents = load_documents(rows, tokenizer, key, max_len, show)
    return documents, examples_fingerprint(row.row if key is None else row.row[key] for row in rows)


def check_models(
    config: TrainPPOConfig, strategy: DeepspeedStrategy, samples: bool = True
) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig, tuple[str, str] | None]:
    """Check what needs neither data nor weights; tokenizer, the actor's config, and what the critic starts from.

    Only a run that ``samples`` needs an engine.
    """
    model = config.model
    _check_algorithm(config)
    actor_config = collective(strategy.comm, lambda: check_model(model.pretrain, "--pretrain", model.trust_remote_code))
    _check_lora(config)
    load_options(config.deepspeed.bf16, model.flash_attn, config.lora.load_in_4bit)  # what they need is installed
    _check_gpu_options(config, actor_config, strategy, samples)
    if samples:
        _check_engine(config, actor_config, strategy)
    tokenizer = load_policy_tokenizer(model.pretrain, model.trust_remote_code, config.data.chat_template_kwargs)
    critic = critic_start(config) if ESTIMATORS[config.advantage.advantage_estimator].uses_critic else None
    _check_vocabularies(config, tokenizer, critic)
    return tokenizer, actor_config, critic


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


def _check_lora(config: TrainPPOConfig) -> None:
    """Before other models are loaded, which takes long."""
    if config.lora.lora_rank > 0:
        try:
            refuse_stacked_adapters(config.model.pretrain)
        except ValueError as error:
            raise ValueError(f"--pretrain {error}") from error


def _check_engine(config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy) -> None:
    if config.generation.rollout_engine == "vllm":
        collective(strategy.comm, check_vllm)
    else:
        check_cache(actor_config)
        check_transformers()


def _check_gpu_options(
    config: TrainPPOConfig, actor_config: PreTrainedConfig, strategy: DeepspeedStrategy, samples: bool
) -> None:
    here = strategy.device.type == "cuda" or config.run.dry_run  # which may be about another machine
    if samples and config.generation.cuda_graphs:
        if not here:
            raise ValueError("--cuda_graphs records steps on a GPU, and this run is on a CPU: leave it out.")
        check_layers(actor_config)
    if config.ppo.offload_idle and not here and strategy.is_main:
        logger.warning("--offload_idle: there is no GPU whose memory it would save, it only takes time")


def _check_vocabularies(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, critic: tuple[str, str] | None
) -> None:
    """Refuse a critic or reference with another vocabulary than the actor."""
    trust, of_critic = config.model.trust_remote_code, critic or ("", None)
    for flag, name, role in ((*of_critic, "a critic"), ("--ref_pretrain", config.model.ref_pretrain, "a reference")):
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


def critic_start(config: TrainPPOConfig) -> tuple[str, str]:
    """Flag and name of the model that the critic starts from."""
    starts = (
        ("--critic_pretrain", config.model.critic_pretrain),
        ("--reward_pretrain", config.rewards.reward_pretrain),
    )
    return next(((flag, name) for flag, name in starts if name), ("--pretrain", config.model.pretrain))


def check_contexts(config: TrainPPOConfig, data: PPOData, critic: tuple[str, str] | None) -> None:
    """Refuse sequences beyond the context of critic or reference."""
    new_tokens = config.generation.generate_max_len
    for flag, name in (critic or ("", None), ("--ref_pretrain", config.model.ref_pretrain)):
        if name is not None and flag != "--pretrain":
            model_config = check_model(name, flag, config.model.trust_remote_code)
            check_context(model_config, f"{flag} {name}", data.longest - new_tokens, new_tokens)


def longest_sequence(config: TrainPPOConfig, actor_config: PreTrainedConfig) -> int:
    """Largest number of tokens of a prompt with its response."""
    wanted = max(config.data.prompt_max_len + config.generation.generate_max_len, LONGEST)
    context = context_length(actor_config)
    return wanted if context is None else min(wanted, context)
