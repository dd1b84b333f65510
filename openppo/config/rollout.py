"""Options of sampling: of responses to train on, and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.fields import (
    Options,
    at_least,
    inside,
    not_empty,
    not_negative,
    option,
    positive,
)
from openppo.config.rewards import NONE

ALL_TOKENS = (0, -1)
"""Values of top_k that switch it off in transformers and in vLLM; here that is None."""


@dataclass(frozen=True, kw_only=True)
class ResponseConfig(Options):
    """Sampling of responses, and their ends."""

    generate_max_len: int = option(1024, at_least(1), measures=True)
    """Largest number of sampled tokens per response."""
    temperature: float = option(1.0, positive)
    """Sampling temperature, applied wherever log-probs are taken."""
    top_p: float = option(1.0, inside("(0, 1]"))
    """Sample from the smallest set of tokens with this total probability."""
    top_k: int | None = option(None, at_least(-1))
    """Sample only from this many of the most likely tokens (0 or -1: from all)."""
    stop: tuple[str, ...] = option((), not_empty, measures=True)
    """End a response when its text contains one of these; their tokens stay in the response."""
    stop_token_ids: tuple[int, ...] = option((), not_negative, measures=True)
    """End a response at these token ids too, besides EOS. The tokenizer must know them."""
    min_new_tokens: int = option(0, not_negative, measures=True)
    """Before this many tokens sample neither EOS nor --stop_token_ids, and ignore --stop."""

    def __post_init__(self) -> None:
        if self.top_k in ALL_TOKENS:
            object.__setattr__(self, "top_k", None)

    def problems(self) -> Iterator[str]:
        least = self.min_new_tokens
        most = self.generate_max_len
        if least > most:
            yield f"--min_new_tokens {least} exceeds --generate_max_len {most}: lower it."


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(ResponseConfig):
    """Sampling of responses by an engine that is checked first."""

    engine_check: Literal["on", "off"] = "on"
    """Compare log-probs of a few sampled tokens with a plain forward's, and refuse a model where they differ."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay recorded decode steps on a GPU (auto: where the model allows it).
    Not with vLLM, nor with a sliding window."""


@dataclass(frozen=True)
class GenerationConfig(SamplingConfig):
    """Sampling of responses, and the engine that samples."""

    rollout_engine: Literal["hf", "vllm"] = "hf"
    """Sample with the actor's own module (hf), or with a copy of it in vLLM (vllm, must be installed)."""
    vllm_gpu_memory_utilization: float = option(0.3, inside("(0, 1)"))
    """Share of a GPU's memory (without GPUs: the host's) for vLLM's copy and key-value cache, on each rank."""
    vllm_tensor_parallel_size: int = option(1, at_least(1))
    """Ranks that share one copy of the policy in vLLM if it exceeds a GPU; they decode in lockstep."""
    max_num_seqs: int | None = option(None, at_least(1))
    """Responses decoded at a time on one rank (default: 64 on CPUs, 256 on GPUs, fewer where memory is short)."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.cuda_graphs == "on" and self.rollout_engine == "vllm":
            yield "--cuda_graphs works with --rollout_engine hf only; vLLM records its own graphs: leave it out."
        pieces = self.vllm_tensor_parallel_size
        if pieces > 1 and self.rollout_engine == "hf":
            yield f"--vllm_tensor_parallel_size {pieces} works with --rollout_engine vllm only: leave it out."


@dataclass(frozen=True)
class EvaluationConfig(Options):
    """Responses to held-out prompts, scored during training."""

    eval_data: str | None = option(None, place=True, measures=True)
    """Held-out prompts, in any format of --prompt_data (off when not given)."""
    eval_split: str = option("test", measures=True)
    """Split of --eval_data when it has splits."""
    eval_steps: int = option(-1, at_least(1, other=-1))
    """Evaluate every this many global steps (-1: at the end of each episode)."""
    eval_before_training: bool = False
    """Evaluate before the first step too."""
    val_only: bool = False
    """Evaluate --pretrain, with --load_checkpoint the newest checkpoint, log to '<save_path>_val_only', and end."""
    eval_n_samples_per_prompt: int = option(1, at_least(1), measures=True)
    """Responses to each held-out prompt; with several, pass@k is reported up to this k."""
    eval_temperature: float = option(0.0, not_negative, measures=True)
    """Temperature of evaluation (0: the likeliest token)."""
    eval_reward_fn: str | None = option(None, place=True, measures=True)
    """Score evaluations with this Python function alone, path.py or path.py:name (default: as in training)."""
    pass_reward: float | None = option(None, measures=True)
    """Reward from which a response passes (default: 1; with a reward model or server none, so pass@k is left out)."""
    pass_on: str | None = option(None, not_empty, measures=True)
    """Named reward that alone decides whether a response passes, before its weight (default: the sum of all)."""

    def problems(self) -> Iterator[str]:
        n = self.eval_n_samples_per_prompt
        if n > 1 and self.eval_temperature == 0:
            yield f"--eval_n_samples_per_prompt {n} would give one response {n} times: raise --eval_temperature."
        if self.eval_reward_fn == NONE:
            yield f"--eval_reward_fn {NONE}: only --reward_fn can be {NONE}; leave it out, or name a file."
