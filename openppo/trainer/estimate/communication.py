"""Bytes that one rank sends in a global step, for ring algorithms: (n - 1) / n of what is gathered or scattered.

ZeRO's analysis (arXiv 1910.02054, section 7) with what DeepSpeed 0.19.8 does: stages 1 and 2 reduce their buckets with
an all-reduce (``use_multi_rank_bucket_allreduce``), stage 2 and 3 after every micro-batch, in float32.
"""

from __future__ import annotations

from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.states import Setting, n_trained

_REDUCED = 4  # bytes: ds_config.py has gradients reduced in float32


def all_gather_bytes(n_bytes: int, n_ranks: int) -> int:
    """Sent by one rank while ``n_bytes`` in all are gathered on each; a reduce-scatter of as many sends the same."""
    return n_bytes * (n_ranks - 1) // n_ranks


def all_reduce_bytes(n_bytes: int, n_ranks: int) -> int:
    """A reduce-scatter and an all-gather."""
    return 2 * all_gather_bytes(n_bytes, n_ranks)


def forward_bytes(shape: ModelShape, setting: Setting, lora_rank: int = 0) -> int:
    """One forward pass: under ZeRO-3 weights are gathered, but for small parameters, which are whole on each rank."""
    if setting.zero_stage < 3:
        return 0
    gathered = shape.n_parameters + sum(shape.adapter_sizes(lora_rank)) - shape.kept_whole(lora_rank)
    return all_gather_bytes(setting.element * gathered, setting.n_ranks)


def optimizer_step_bytes(shape: ModelShape, setting: Setting, micro_batches: int, lora_rank: int = 0) -> int:
    """An optimizer step of ``micro_batches`` forward and backward passes."""
    n, ranks = n_trained(shape, lora_rank), setting.n_ranks
    gradients = _REDUCED * n
    if setting.zero_stage == 3:  # weights are released after the forward pass and gathered again
        return micro_batches * (2 * forward_bytes(shape, setting, lora_rank) + all_gather_bytes(gradients, ranks))
    if setting.zero_stage == 0:
        return all_reduce_bytes(gradients, ranks)
    reductions = micro_batches if setting.zero_stage == 2 else 1
    return reductions * all_reduce_bytes(gradients, ranks) + all_gather_bytes(setting.element * n, ranks)
