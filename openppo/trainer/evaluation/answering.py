"""Models that answer prompts without training: what the generate and evaluate commands have in common."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo.config import PromptsConfig, parse_probs
from openppo.datasets import load_mixed_rows, load_prompts
from openppo.models.actor import Actor
from openppo.models.loading import attention_implementation, model_error_context
from openppo.models.pretrained import check_model, check_token_ids, known_eos_token_ids, pad_token_id
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.row_cache import check_cache
from openppo.strategy.gpu import check_transformers
from openppo.strategy.inference import InferenceStrategy
from openppo.trainer.engine_check import check_frozen
from openppo.trainer.startup import check_context, load_policy_tokenizer, log_dropped, tokenizing
from openppo.types import Comm, Prompt, SamplingParams, Trajectory


def sampling_params(options: PromptsConfig) -> SamplingParams:
    """How the options ask to sample."""
    return SamplingParams(options.generate_max_len, options.temperature, options.top_p, options.top_k)


def load_questions(options: PromptsConfig, comm: Comm) -> tuple[PreTrainedTokenizerBase, list[Prompt]]:
    """The tokenizer and the rendered prompts; ``ValueError`` names the flag of what cannot work."""
    model_config = check_model(options.pretrain, "--pretrain", options.trust_remote_code)
    check_cache(model_config)
    check_transformers()
    attention_implementation(options.flash_attn, options.bf16)
    tokenizer = load_policy_tokenizer(options.pretrain, options.trust_remote_code, options.chat_template_kwargs)
    rows = load_mixed_rows(
        parse_probs(options.prompt_data, None, "prompt_data"),
        flag="--prompt_data",
        split=options.prompt_split,
        max_samples=options.max_samples,
        seed=options.seed,
        dataset_class=options.dataset_class,
    )
    loaded = load_prompts(rows, tokenizer, options, show=tokenizing(comm))
    log_dropped(loaded.dropped, len(loaded.prompts), "--prompt_data", "--prompt_max_len")
    longest = max(len(prompt.token_ids) for prompt in loaded.prompts)
    check_context(model_config, f"--pretrain {options.pretrain}", longest, options.generate_max_len)
    ids = [prompt.token_ids for prompt in loaded.prompts]
    check_token_ids(model_config, f"--pretrain {options.pretrain}", tokenizer, ids)
    return tokenizer, loaded.prompts


def load_policy(
    options: PromptsConfig, tokenizer: PreTrainedTokenizerBase, strategy: InferenceStrategy
) -> tuple[Actor, HFEngine]:
    """The model of ``--pretrain`` on this rank's device, and an engine that samples from it."""
    with model_error_context("--pretrain", options.pretrain):
        trust = options.trust_remote_code
        actor = Actor(options.pretrain, bf16=options.bf16, flash_attn=options.flash_attn, trust_remote_code=trust)
    strategy.prepare_frozen(actor)
    if options.engine_check == "on":
        check_frozen(options, actor, strategy.device)
    policy: Any = actor.model
    engine = HFEngine(
        policy,
        known_eos_token_ids(policy, tokenizer),
        pad_token_id(tokenizer),
        options.micro_batch_size,
        show_progress=strategy.is_main,
    )
    return actor, engine


def response_row(response: Trajectory, sample: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What is written of the ``sample``-th response to its prompt."""
    return {
        "source": response.prompt.source,
        "row": response.prompt.index,
        "sample": sample,
        "prompt": response.prompt.text,
        "response": tokenizer.decode(response.response_ids, skip_special_tokens=True),
        "finish_reason": response.finish_reason.value,
        "n_tokens": len(response.response_ids),
        "label": response.prompt.label,
    }
