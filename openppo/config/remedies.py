"""Flags that lower memory: one table for --dry_run, reports of out-of-memory errors and docs/memory.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAMPLING = ("generation", "evaluation")
_FORWARDS = ("scoring", "experience")
_TRAINING = ("training", "step")  # the phase "step" belongs to supervised training
_PHASES = ("loading", *_SAMPLING, *_FORWARDS, *_TRAINING)

REMEDIES = {
    "--max_num_seqs": _SAMPLING,
    "--vllm_gpu_memory_utilization": _SAMPLING,
    "--micro_rollout_tokens": ("experience",),
    "--micro_rollout_batch_size": _FORWARDS,
    "--micro_batch_size": (*_SAMPLING, "scoring"),
    "--micro_train_tokens": _TRAINING,
    "--micro_train_batch_size": _TRAINING,
    "--gradient_checkpointing": _TRAINING,
    "--zero_stage 2": _TRAINING,
    "--zero_stage 3": _PHASES,
    "--adam_offload": _PHASES,
    "--offload_idle": ("generation", *_FORWARDS),
    "--generate_max_len": (*_SAMPLING, *_FORWARDS, "training"),
    "--prompt_max_len": (*_SAMPLING, *_FORWARDS, "training"),
    "--max_len": _TRAINING,
    "--bf16": _PHASES,
    "--lora_rank 16": _PHASES,
    "--load_in_4bit": _PHASES,
}
"""Flags, with a value where one is recommended, and the phases whose memory they lower.

Flags down to ``--offload_idle`` leave the gradient as it is; those below change the computation.
"""

_FOR_GPUS = {"adam_offload", "offload_idle"}
_BATCHES = ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")


def remedies(phase: str, options: Mapping[str, Any], on_cpu: bool = False) -> list[str]:
    """List flags of a command with ``options`` that lower memory in ``phase``, first those that keep the gradient.

    An unknown phase gets all flags. On a CPU the host's memory is the device's, so offloading is left out.
    """
    flags = []
    for flag, phases in REMEDIES.items():
        is_of_phase = phase in phases or phase not in _PHASES
        if not is_of_phase or _option(flag) not in options:
            continue
        if on_cpu and _option(flag) in _FOR_GPUS:
            continue
        if not _has_no_effect(phase, flag, options):
            flags.append(flag)
    return flags


def sizes(options: Mapping[str, Any]) -> list[str]:
    """List the options that decide memory, as flags with their values."""
    names = dict.fromkeys([*_BATCHES, *map(_option, REMEDIES)])
    return [f"--{name} {options[name]}" for name in names if options.get(name) is not None]


def _option(flag: str) -> str:
    return flag.removeprefix("--").split()[0]


def _has_no_effect(phase: str, flag: str, options: Mapping[str, Any]) -> bool:
    """True if the run has the recommended value, or other options leave the flag without effect or refuse it."""
    name = _option(flag)
    value = options[name]
    if name == "zero_stage":
        return bool(value >= int(flag.split()[1]))

    stage = options.get("zero_stage")
    rank = options.get("lora_rank")
    trains_by_tokens = phase == "training" and options.get("micro_train_tokens") is not None
    makes_by_tokens = phase == "experience" and options.get("micro_rollout_tokens") is not None
    no_effect = {
        "lora_rank": rank,
        "load_in_4bit": rank == 0 or stage == 3,
        "adam_offload": options.get("offload_idle") or stage == 0,
        "offload_idle": options.get("adam_offload"),
        "vllm_gpu_memory_utilization": options.get("rollout_engine") != "vllm",
        "micro_train_tokens": value is None,
        "micro_rollout_tokens": value is None,
        "micro_train_batch_size": trains_by_tokens,
        "micro_rollout_batch_size": makes_by_tokens,
    }
    is_set_or_lowest = value == 1  # True equals 1
    return bool(no_effect.get(name)) or is_set_or_lowest
