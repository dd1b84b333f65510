"""Which flags lower memory: one table for --dry_run, reports of out-of-memory errors and docs/memory.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_GENERATION = ("generation", "evaluation")
_TRAINING = ("training", "step")  # the phase "step" belongs to supervised training
_PHASES = ("loading", *_GENERATION, "scoring", "experience", *_TRAINING)


class Remedy(NamedTuple):
    """A flag as the command line has it, with a value where one is recommended."""

    flag: str
    lowers: str
    phases: tuple[str, ...]

    @property
    def option(self) -> str:
        """Name of the option."""
        return self.flag.removeprefix("--").split()[0]


REMEDIES = (
    Remedy("--max_num_seqs", "key-value cache", _GENERATION),
    Remedy("--vllm_gpu_memory_utilization", "weights and cache of vLLM", _GENERATION),
    Remedy("--micro_rollout_tokens", "logits of the experience phase", ("experience",)),
    Remedy("--micro_rollout_batch_size", "logits of the experience phase, reward models", ("scoring", "experience")),
    Remedy("--micro_batch_size", "`generate` and `evaluate`: cache, reward models", (*_GENERATION, "scoring")),
    Remedy("--micro_train_tokens", "activations and logits of training", _TRAINING),
    Remedy("--micro_train_batch_size", "activations and logits of training", _TRAINING),
    Remedy("--gradient_checkpointing", "activations of training", _TRAINING),
    Remedy("--zero_stage 2", "gradients and optimizer, divided by the ranks", _TRAINING),
    Remedy("--zero_stage 3", "weights, gradients and optimizer, divided by the ranks", _PHASES),
    Remedy("--adam_offload", "master weights and moments, which go to the host", _PHASES),
    Remedy("--offload_idle", "moments, which go to the host outside training", ("generation", "scoring", "experience")),
    Remedy("--buffer_cpu_offload", "replay buffer, which goes to the host", _TRAINING),
    Remedy("--generate_max_len", "cache, activations and logits", (*_GENERATION, "scoring", "experience", "training")),
    Remedy("--prompt_max_len", "cache, activations and logits", (*_GENERATION, "scoring", "experience", "training")),
    Remedy("--max_len", "activations and logits of supervised training", _TRAINING),
    Remedy("--bf16", "activations and frozen weights by half", _PHASES),
    Remedy("--lora_rank 16", "gradients, optimizer and reference", _PHASES),
    Remedy("--load_in_4bit", "frozen weights, with LoRA", _PHASES),
)
"""The flags down to ``--buffer_cpu_offload`` leave the gradient as it is; those below change what is computed."""

_FOR_GPUS = {"adam_offload", "offload_idle", "buffer_cpu_offload"}
_BATCHES = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")


def remedies(phase: str, options: Mapping[str, Any], on_cpu: bool = False) -> list[str]:
    """Flags of a command with ``options`` that lower memory in ``phase``, those that keep the gradient first.

    An unknown phase gets all flags. On a CPU the host's memory is the device's, so offloading is left out.
    """
    return [
        remedy.flag
        for remedy in REMEDIES
        if (phase in remedy.phases or phase not in _PHASES)
        and remedy.option in options
        and not (on_cpu and remedy.option in _FOR_GPUS)
        and not _has_no_effect(phase, remedy, options)
    ]


def sizes(options: Mapping[str, Any]) -> list[str]:
    """Options that decide memory, as flags with their values."""
    names = dict.fromkeys([*_BATCHES, *(remedy.option for remedy in REMEDIES)])
    return [f"--{name} {options[name]}" for name in names if options.get(name) is not None]


def _has_no_effect(phase: str, remedy: Remedy, options: Mapping[str, Any]) -> bool:
    """Whether the run has what is recommended, or other options leave it without effect or refuse it."""
    name, value = remedy.option, options[remedy.option]
    if name == "zero_stage":
        return bool(value >= int(remedy.flag.split()[1]))
    stage, rank = options.get("zero_stage"), options.get("lora_rank")
    no_effect = {
        "lora_rank": rank,
        "load_in_4bit": rank == 0 or stage == 3,
        "adam_offload": options.get("offload_idle") or stage == 0,
        "offload_idle": options.get("adam_offload"),
        "vllm_gpu_memory_utilization": options.get("rollout_engine") != "vllm",
        "micro_train_tokens": value is None,
        "micro_rollout_tokens": value is None,
        "micro_train_batch_size": phase == "training" and options.get("micro_train_tokens") is not None,
        "micro_rollout_batch_size": phase == "experience" and options.get("micro_rollout_tokens") is not None,
    }
    return bool(no_effect.get(name)) or value == 1  # which True equals
