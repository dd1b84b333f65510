"""Gradient norms of DeepSpeed's optimizers in a few kernels, instead of about 16 for each gradient.

DeepSpeed 0.19.8 has two optimizers for ZeRO-1 and 2. Both skip an update, on all ranks alike, where the norm over all
ranks is not finite. ``DeepSpeedZeroOptimizer`` (ZeRO-2, and ZeRO-1 in float32) first checks bfloat16 gradients for NaN
and infinity, with a collective and a wait of its own (``check_overflow``), although the norm shows them too.
``BF16_Optimizer`` (ZeRO-1 in bfloat16) keeps all gradients in flat tensors already.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from openppo import logger

REPLACED = {
    DeepSpeedZeroOptimizer: ("check_overflow", "get_grad_norm_direct"),
    BF16_Optimizer: ("get_grads_for_norm",),
}
"""Replaced methods, by class."""
READ = {
    DeepSpeedZeroOptimizer: (
        "compute_grad_norm",
        "cpu_offload",
        "device",
        "dp_process_group",
        "has_moe_layers",
        "mpu",
    ),
    BF16_Optimizer: ("fp32_groups_gradients_flat", "has_moe_layers", "mpu"),
}
"""Required attributes, by class."""


def join_gradient_norms(optimizer: Any, on_gpu: bool) -> bool:
    """Make a ZeRO-1 or 2 ``optimizer`` compute its gradient norm in one go; return True if it does.

    Unknown classes and versions keep DeepSpeed's method, with a line in the log. Gradients on the host
    (``--adam_offload``) keep it without one, and so does ``BF16_Optimizer`` on CPUs, whose norm would differ by 2e-7;
    all other norms are equal bit for bit.
    """
    kind = type(optimizer)
    version = f"DeepSpeed {deepspeed.__version__}"
    if kind not in REPLACED:
        _log_slow_norm(f"{version} made a {kind.__name__}, which is not known")
        return False
    missing = missing_names(optimizer)
    if missing:
        _log_slow_norm(f"{kind.__name__} of {version} has no {', '.join(missing)}")
        return False
    if optimizer.has_moe_layers or optimizer.mpu is not None:
        _log_slow_norm(f"{kind.__name__} shares gradients between experts or parts of a model")
        return False

    if kind is BF16_Optimizer:
        if on_gpu:
            flat = optimizer.fp32_groups_gradients_flat
            optimizer.get_grads_for_norm = partial(_flat_gradients, flat)
        return on_gpu

    if optimizer.cpu_offload or not optimizer.compute_grad_norm:
        return False
    optimizer.check_overflow = _leave_to_norm
    optimizer.get_grad_norm_direct = partial(_norm_over_ranks, optimizer)
    return True


def missing_names(optimizer: Any) -> list[str]:
    """Return the names of ``REPLACED`` and ``READ`` that this DeepSpeed's ``optimizer`` lacks."""
    kind = type(optimizer)
    required = (*REPLACED[kind], *READ[kind])
    return [name for name in required if not hasattr(optimizer, name)]


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of ``tensors``, float64 (n,), without a copy of them in float64."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def _log_slow_norm(reason: str) -> None:
    logger.info("gradient norms: %s, so each optimizer step takes DeepSpeed's slower way.", reason)


def _leave_to_norm(partition_gradients: bool = True) -> None:
    """Replace ``check_overflow`` and do nothing: ``step`` sets ``overflow`` from the norm."""


def _norm_over_ranks(
    optimizer: Any, gradients: Sequence[Tensor], params: object, norm_type: float = 2
) -> Tensor:
    """Replace ``get_grad_norm_direct``: return the L2 norm over all ranks, float32 (); -1 unless it is finite.

    ``params``, which belong to the ``gradients``, matter only to models that DeepSpeed itself splits.
    """
    parts = [part.detach() for part in gradients if not getattr(part, "_zero_padding", False)]
    square = torch.zeros((), device=optimizer.device)
    if parts:
        square = norms(parts).square().sum().float()
    dist.all_reduce(square, group=optimizer.dp_process_group)
    norm = square.sqrt()
    return torch.where(norm.isfinite(), norm, -1.0)


def _flat_gradients(flat: list[Tensor], for_clipping: bool = False) -> Any:
    """Replace ``get_grads_for_norm``: return the gradients if ``for_clipping``, else their norms, and no experts.

    Each rank has the whole gradients, with zeros for parameters that have none.
    """
    return flat if for_clipping else ([norms(flat)], {})
