"""Prompts, held-out prompts and documents of a PPO run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.config import PPODataConfig, TrainPPOConfig, parse_probs
from openppo.datasets import ShowRows, TokenExample, load_documents, load_mixed_rows, load_prompts, render_prompt
from openppo.datasets.templates import as_messages
from openppo.models.pretrained import check_token_ids
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.startup import check_context, check_same, log_dropped, on_all_ranks, tokenizing
from openppo.types import Comm, Prompt


@dataclass(frozen=True)
class PPOData:
    """``held_out`` is empty without ``--eval_data``, ``documents`` without ``--pretrain_data``.

    ``longest`` is the most tokens that a prompt and its response can have; documents are cut there, and their
    ``fingerprint`` is of what they were before, so that a run may go on with another ``--generate_max_len``.
    """

    prompts: list[Prompt]
    held_out: list[Prompt]
    documents: list[TokenExample]
    fingerprint: str
    longest: int


def load_ppo_data(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig, comm: Comm
) -> PPOData:
    """Everything that the run reads, the same on all ranks.

    ``ValueError`` names the flag and the row of what cannot be used, and the ranks if only some cannot.
    """
    data = on_all_ranks(comm, lambda: _load(config, tokenizer, actor_config, tokenizing(comm)))
    prompts, held_out = ([(p.token_ids, p.label) for p in each] for each in (data.prompts, data.held_out))
    check_same(comm, {"--prompt_data": prompts, "--eval_data": held_out, "--pretrain_data": data.documents})
    return data


def _load(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, actor_config: PreTrainedConfig, show: ShowRows
) -> PPOData:
    data, held_out = config.data, []
    flag, source, split = "--prompt_data", data.prompt_data, data.prompt_split
    prompts = _prompts(config, tokenizer, flag, source, data.prompt_data_probs, split, show)
    if config.evaluation.eval_data is not None:
        source, split = config.evaluation.eval_data, config.evaluation.eval_split
        held_out = _prompts(config, tokenizer, "--eval_data", source, None, split, show)
    new_tokens = config.generation.generate_max_len
    longest_prompt = max(len(prompt.token_ids) for prompt in [*prompts, *held_out])
    check_context(actor_config, f"--pretrain {config.model.pretrain}", longest_prompt, new_tokens)
    longest = longest_prompt + new_tokens
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
    data = config.data
    rows = load_mixed_rows(
        parse_probs(source, probs, flag.removeprefix("--")),
        flag=flag,
        split=split,
        max_samples=data.max_samples,
        seed=config.deepspeed.seed,
        dataset_class=data.dataset_class,
    )
    loaded = load_prompts(rows, tokenizer, data, flag=flag, show=show)
    log_dropped(loaded.dropped, len(loaded.prompts), flag, "--prompt_max_len")
    return loaded.prompts


def _documents(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, max_len: int, show: ShowRows
) -> tuple[list[TokenExample], str]:
    """Documents and their fingerprint."""
    data = config.data
    if data.pretrain_data is None or config.ppo.ptx_coef == 0:
        return [], ""
    rows = load_mixed_rows(
        parse_probs(data.pretrain_data, data.pretrain_data_probs, "pretrain_data"),
        flag="--pretrain_data",
        split=data.pretrain_split,
        max_samples=data.max_samples,
        seed=config.deepspeed.seed,
    )
    key = data.pretrain_key or data.input_key
    documents = load_documents(rows, tokenizer, key, max_len, show)
    return documents, examples_fingerprint(row.row if key is None else row.row[key] for row in rows)


def as_prompt(prompt: str | Prompt, tokenizer: PreTrainedTokenizerBase, data: PPODataConfig) -> Prompt:
    """A text as the prompt that the options make of it; ``ValueError`` if it is too long."""
    if isinstance(prompt, Prompt):
        return prompt
    messages, template = None, data.input_template
    if data.apply_chat_template:
        messages, template = as_messages(prompt, "user", template), None
    text, ids = render_prompt(
        messages or prompt, tokenizer, input_template=template, apply_chat_template=data.apply_chat_template
    )
    if len(ids) > data.prompt_max_len:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than prompt_max_len {data.prompt_max_len}: {text!r}")
    return Prompt(text, ids, messages=messages)
