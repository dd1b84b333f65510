"""Token budgets of micro-batches: the largest that the estimate of memory allows."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from openppo.build.memory.estimate import Estimate
from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.models.size import ModelSize

TOKEN_BUDGETS = (131072, 65536, 32768, 16384, 8192, 4096, 2048)
"""Tokens of a micro-batch on a GPU; with fewer, kernels take less time than their launches."""
TOKEN_BUDGETS_ON_CPU = (8192, 4096, 2048, 1024, 512)
"""The same on a CPU; beyond, nothing gets faster (benchmarks/results)."""
_USUAL_BUDGET = 32768
_LAUNCHING_A_LAYER = 6e-3
"""Seconds in which the host launches a layer's forward and backward pass, benchmarks/results/2026-11-27-h200.md."""
_FLOPS = 2.5e14
"""Operations in a second of training, of a model of 0.5B on the same H200."""
_USABLE = 0.9
"""Fraction of a GPU's memory that phases may fill; allocators keep some of the rest."""
_USABLE_ON_CPU = 0.5
"""The same of a host, which has other work; glibc keeps up to 0.8 times the estimate (docs/memory.md)."""
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def token_budgets(actor: ModelSize, on_cpu: bool = False) -> Sequence[int]:
    """Return the budgets worth trying, the largest first: with more tokens, training never waits for launches.

    A token takes six operations for each parameter, forward and backward.
    """
    if on_cpu:
        return TOKEN_BUDGETS_ON_CPU
    launching_s = _LAUNCHING_A_LAYER * actor.layers
    enough = max(_USUAL_BUDGET, launching_s * _FLOPS / (6 * actor.n_parameters))
    return [tokens for tokens in TOKEN_BUDGETS if tokens < 2 * enough]


def with_token_budgets(
    config: TrainPPOConfig,
    estimate_of: Callable[[Resolved], Estimate],
    budgets: Sequence[int],
) -> Resolved:
    """Choose the first token budgets that fit, where ``config`` gives no size of micro-batches.

    Without one that fits there is none: a few samples still may fit.
    """
    resolved = Resolved.of(config)

    def fits(candidate: Resolved, phase: str) -> bool:
        estimate = estimate_of(candidate)
        usable = _USABLE_ON_CPU if estimate.machine.on_cpu else _USABLE
        return estimate.phases[phase] <= usable * estimate.machine.room

    if config.batch.micro_train_batch_size is None and resolved.micro_train_tokens is None:
        candidates = [replace(resolved, micro_train_tokens=tokens) for tokens in budgets]
        resolved = next((each for each in candidates if fits(each, "training")), resolved)

    if config.ppo.micro_rollout_batch_size is None and resolved.micro_rollout_tokens is None:
        candidates = [replace(resolved, micro_rollout_tokens=tokens) for tokens in budgets]
        resolved = next((each for each in candidates if fits(each, "experience")), resolved)
    return resolved


def machine_memory() -> int:
    """Bytes of the machine's memory, or of the container's where it is limited to less (control groups, version 2)."""
    total = psutil.virtual_memory().total
    with suppress(OSError):
        limit = _CONTAINER_LIMIT.read_text().strip()
        if limit != "max":
            return min(total, int(limit))
    return total
