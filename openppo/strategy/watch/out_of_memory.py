"""Out of memory: how it is recognized, what was in use, and which flags need less."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_TEXTS = (
    *("DefaultCPUAllocator", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory"),
    *("Cuda failure 2 'out of memory'", "Cuda failure 'out of memory'"),  # of NCCL, whose buffers are its own
)
_SIZES = """
    rollout_batch_size n_samples_per_prompt micro_rollout_batch_size prompt_max_len generate_max_len
    train_batch_size micro_train_batch_size micro_train_tokens micro_rollout_tokens micro_batch_size max_len zero_stage
    bf16 gradient_checkpointing adam_offload lora_rank load_in_4bit buffer_cpu_offload
""".split()
"""Options that decide what is in memory."""
_GENERATION = ("--max_num_seqs", "--micro_batch_size", "--generate_max_len", "--prompt_max_len")
_SCORING = ("--micro_rollout_batch_size", "--micro_batch_size", "--generate_max_len")
_EXPERIENCE = ("--micro_rollout_tokens", *_SCORING)
_TRAINING = (
    "--micro_train_tokens",
    "--micro_train_batch_size",
    "--gradient_checkpointing",
    "--generate_max_len",
    "--max_len",
    "--zero_stage 3",
)
_STATES = ("--bf16", "--zero_stage 3", "--adam_offload", "--lora_rank 16", "--load_in_4bit")
_REMEDIES = {
    "loading": _STATES,
    "generation": _GENERATION,
    "evaluation": _GENERATION,
    "scoring": _SCORING,
    "experience": _EXPERIENCE,
    "training": (*_TRAINING, *_STATES[2:]),
    "step": (*_TRAINING, *_STATES[2:]),  # of supervised training
}
_BOUND_ELSEWHERE = {
    ("experience", "micro_rollout_tokens"): "--micro_rollout_batch_size",
    ("training", "micro_train_tokens"): "--micro_train_batch_size",
}
"""Flags that bound nothing in a phase (but documents of the PTX loss) where another option has a value."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, is a lack of GPU or CPU memory."""
    return any(
        isinstance(cause, MemoryError | torch.OutOfMemoryError)
        or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)
        or (isinstance(cause, RuntimeError) and any(text in str(cause) for text in _TEXTS))
        for cause in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those from which it came."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def host_memory() -> str:
    """Memory of this process and of its machine or container, in words; empty where the system does not say."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        rows = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    except OSError:
        return ""
    machine = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in rows}
    text = f"process {_gib(resident)}, machine {_gib(machine['MemAvailable'])} available of {_gib(machine['MemTotal'])}"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        text += f", address space of the process limited to {_gib(limit)} (ulimit -v)"
    return text + _container_memory()


def memory_lines(options: Mapping[str, Any]) -> list[str]:
    """Sizes in use on this rank, and the ``options`` of the command that decide them."""
    lines = [host_memory()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # Not the current device: that of a thread which never set it, such as the watch's, is GPU 0.
        gpu = int(os.environ.get("LOCAL_RANK", "0"))
        peak = torch.cuda.max_memory_allocated(gpu)
        line = (
            f"GPU {gpu}: {_gib(torch.cuda.memory_allocated(gpu))} allocated, "
            f"{_gib(torch.cuda.memory_reserved(gpu))} reserved, {_gib(peak)} at the peak of the phase"
        )
        with contextlib.suppress(RuntimeError):  # a full GPU may refuse to say more
            free, total = torch.cuda.mem_get_info(gpu)
            line += f", {_gib(free)} free of {_gib(total)}"
        lines.append(line)
    sizes = [f"--{name} {options[name]}" for name in _SIZES if options.get(name) is not None]
    return [*lines, "options: " + " ".join(sizes)] if sizes else lines


def remedies(phase: str, options: Mapping[str, Any]) -> list[str]:
    """Flags of the command that need less memory in a phase, those that change no result first."""
    flags = _REMEDIES.get(phase, (*_GENERATION, *_TRAINING, *_STATES[2:]))
    useless = {_BOUND_ELSEWHERE.get((phase, name)) for name, value in options.items() if value is not None}
    known = [
        flag for flag in flags if flag[2:].split()[0] in options and flag not in useless and not _is_set(flag, options)
    ]
    if not known:
        return []
    first = "; the micro batch size first: it changes no result" if "--micro_" in known[0] else ""
    return [f"needs less memory in phase {phase}: {', '.join(known)}{first}"]


def _is_set(flag: str, options: Mapping[str, Any]) -> bool:
    """Whether the run has what ``flag`` recommends already."""
    name, _, value = flag[2:].partition(" ")
    if name == "lora_rank":
        return options[name] > 0
    if name.endswith("_tokens") and options[name] is None:
        return True  # the run counts samples
    return str(options[name]) == value or options[name] is True or (name.startswith("micro_") and options[name] == 1)


def _container_memory() -> str:
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:
        return ""
    return "" if limit == "max" else f", container {_gib(int(used))} used of {_gib(int(limit))}"


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
