"""Models, data, generation and evaluation of train_ppo."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from openppo.config.shared import require

DataFormat = Literal[
    "auto", "plain", "messages", "sharegpt", "alpaca", "hh", "preference", "question_answer", "math_shepherd", "steps"
]


@dataclass(frozen=True)
class PPOModelConfig:
    """Which models play which role."""

    pretrain: str
    """Causal language model to train: a local folder or a hub name."""
    ref_pretrain: str | None = None
    """Reference model of the KL penalty (default: --pretrain; with LoRA the actor, its adapters off)."""
    critic_pretrain: str | None = None
    """Model that the critic starts from (default: the reward model, else the actor)."""
    critic_lora_rank: int | None = None
    """Rank of the critic's adapters (default: --lora_rank; 0: train all of the critic)."""
    value_head_prefix: str = "score"
    """Name of the scalar head in critic and reward checkpoints."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""
    save_value_network: bool = False
    """Also save the critic, in a folder beside --save_path with '_critic' at the end."""

    def validate(self) -> None:
        rank = self.critic_lora_rank
        require(rank is None or rank >= 0, f"--critic_lora_rank must not be negative, got {rank}.")


@dataclass(frozen=True)
class PPODataConfig:
    """Prompts, and documents for the PTX loss."""

    prompt_data: str | None = None
    """Prompts: JSONL, JSON, CSV or Parquet files, folders saved by 'datasets', or hub names; several with commas."""
    prompt_data_probs: str | None = None
    """Shares in which several --prompt_data are mixed, with commas, until one is used up (default: all rows of all)."""
    prompt_split: str = "train"
    """Split of --prompt_data."""
    pretrain_data: str | None = None
    """Documents for the PTX loss, in any format of --prompt_data (off when not given)."""
    pretrain_data_probs: str | None = None
    """Shares in which several --pretrain_data are mixed, with commas, until one is used up."""
    pretrain_split: str = "train"
    """Split of --pretrain_data."""
    pretrain_key: str | None = None
    """Column of --pretrain_data that holds the text (default: --input_key, else recognized)."""
    data_format: DataFormat = "auto"
    """Shape of the rows; 'auto' recognizes it by the columns unless --input_key is given."""
    dataset_class: str | None = None
    """Your own loader of --prompt_data, path.py:name: a class or function called with the source that gives rows."""
    input_key: str | None = None
    """Column of --prompt_data that holds the prompt: a text, or a list of chat messages (default: recognized)."""
    label_key: str | None = None
    """Column of --prompt_data that is passed to the rewards as label (default: the answer of a recognized shape)."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}' (with --apply_chat_template)."""
    max_samples: int | None = None
    """Use only the first this many rows of each data set."""
    prompt_max_len: int = 1024
    """Prompts with more tokens are dropped, with a count in the log."""

    def validate(self) -> None:
        validate_data(self.input_template, self.max_samples, self.apply_chat_template, self.chat_template_kwargs)
        if self.prompt_data is not None:
            parse_probs(self.prompt_data, self.prompt_data_probs, "prompt_data")
        if self.pretrain_data is not None:
            parse_probs(self.pretrain_data, self.pretrain_data_probs, "pretrain_data")
        require(self.prompt_max_len >= 1, f"--prompt_max_len must be at least 1, got {self.prompt_max_len}.")


RolloutEngine = Literal["hf", "vllm"]


@dataclass(frozen=True)
class GenerationConfig:
    """How responses are sampled, and by what."""

    rollout_engine: RolloutEngine = "hf"
    """Sample with the actor's own module (hf), or with a copy of it in vLLM (vllm, must be installed)."""
    vllm_gpu_memory_utilization: float = 0.3
    """Share of a GPU's memory (without GPUs: of the host's) for vLLM's copy and its key-value cache, on each rank."""

    generate_max_len: int = 1024
    """Largest number of sampled tokens per response."""
    temperature: float = 1.0
    """Sampling temperature, applied wherever log-probs are taken."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    top_k: int | None = None
    """Sample from the this many likeliest tokens."""
    max_num_seqs: int | None = None
    """Responses decoded at a time on one rank (default: 64 on CPUs, 256 on GPUs, fewer where memory is short)."""
    cuda_graphs: bool = False
    """Record decode steps on the GPU and replay them, which saves launching kernels one by one (with --rollout_engine
    hf; not for models with a sliding window)."""
    engine_check: Literal["on", "off"] = "on"
    """At the start, compare log-probs of a few sampled tokens with the actor's own, and refuse a model where they
    differ."""

    def validate(self) -> None:
        share = self.vllm_gpu_memory_utilization
        require(0 < share < 1, f"--vllm_gpu_memory_utilization must lie in (0, 1), got {share}.")
        require(self.generate_max_len >= 1, f"--generate_max_len must be at least 1, got {self.generate_max_len}.")
        require(self.temperature > 0, f"--temperature must be positive, got {self.temperature}.")
        require(0 < self.top_p <= 1, f"--top_p must lie in (0, 1], got {self.top_p}.")
        require(self.top_k is None or self.top_k >= 1, f"--top_k must be at least 1, got {self.top_k}.")
        require(
            not (self.cuda_graphs and self.rollout_engine == "vllm"),
            "--cuda_graphs is about --rollout_engine hf; vLLM records graphs of its own: leave it out.",
        )
        rows = self.max_num_seqs
        require(rows is None or rows >= 1, f"--max_num_seqs must be at least 1, got {rows}.")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out prompts, answered and scored while training goes on."""

    eval_data: str | None = None
    """Held-out prompts, in any format of --prompt_data (off when not given)."""
    eval_split: str = "test"
    """Split of --eval_data when it has splits."""
    eval_steps: int = -1
    """Evaluate every this many global steps (-1: at the end of each episode)."""
    eval_before_training: bool = False
    """Evaluate before the first step too."""
    eval_n_samples_per_prompt: int = 1
    """Responses to each held-out prompt; with several, pass@k is reported up to this k."""
    eval_temperature: float = 0.0
    """Temperature of evaluation (0: the likeliest token)."""
    pass_reward: float | None = None
    """A response passes when its reward is at least this (default: 1; with a reward model or server none, and pass@k is
    left out, since its scale is its own)."""

    def validate(self) -> None:
        every = self.eval_steps
        require(every == -1 or every >= 1, f"--eval_steps must be -1 or at least 1, got {every}.")
        n = self.eval_n_samples_per_prompt
        require(n >= 1, f"--eval_n_samples_per_prompt must be at least 1, got {n}.")
        require(self.eval_temperature >= 0, f"--eval_temperature must not be negative, got {self.eval_temperature}.")
        require(
            n == 1 or self.eval_temperature > 0,
            f"--eval_n_samples_per_prompt {n} with --eval_temperature 0 would give the same response {n} times: raise "
            "--eval_temperature.",
        )
        require(
            self.eval_data is not None or not self.eval_before_training,
            "--eval_before_training needs --eval_data.",
        )


def validate_data(
    input_template: str | None, max_samples: int | None, apply_chat_template: bool, chat_template_kwargs: str | None
) -> None:
    """Checks of data options that several commands have."""
    require(
        input_template is None or input_template.count("{}") == 1,
        f"--input_template must contain {{}} once, where the prompt goes; got {input_template!r}.",
    )
    require(max_samples is None or max_samples >= 1, f"--max_samples must be at least 1, got {max_samples}.")
    require(
        chat_template_kwargs is None or apply_chat_template,
        "--chat_template_kwargs has no effect without --apply_chat_template: add it.",
    )
    parse_template_kwargs(chat_template_kwargs)


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """``--chat_template_kwargs`` by name; ``ValueError`` for anything but a JSON object."""
    try:
        parsed = {} if text is None else json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"--chat_template_kwargs {text}: not a JSON object. Write one in single quotes, as in "
            "'{\"enable_thinking\": false}'."
        )
    return parsed


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    require(not repeated, f"the key {', '.join(repeated)} stands twice in a JSON object.")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON.")


def parse_probs(sources: str, probs: str | None, flag: str) -> list[tuple[str, float | None]]:
    """Comma-separated sources with their shares, which sum to 1 (None each without ``probs``)."""
    names = [name.strip() for name in sources.split(",")]
    require(all(names), f"--{flag} {sources!r} has an empty name between commas.")
    if probs is None:
        return [(name, None) for name in names]
    try:
        shares = [float(share) for share in probs.split(",")]
    except ValueError:
        shares = []
    require(
        len(shares) == len(names) and all(0 < share < math.inf for share in shares),
        f"--{flag}_probs {probs!r}: give one positive number for each of the {len(names)} sources of --{flag}, "
        "with commas.",
    )
    return [(name, share / sum(shares)) for name, share in zip(names, shares, strict=True)]
