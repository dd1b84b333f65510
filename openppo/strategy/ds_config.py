"""DeepSpeed configurations as pure functions of our options."""

from typing import Any

from openppo.config import DeepSpeedConfig

LARGEST_BUCKET = 500_000_000
"""Most gradient elements that are reduced at a time."""
_EVERY_ENGINE = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10**9,
    # The timer is on by default, and waits for the GPU in each forward.
    "timers": {"throughput": {"enabled": False}},
}
"""Options of all engines."""


def train_config(
    options: DeepSpeedConfig, zero_stage: int, n_trained: int, n_ranks: int, on_gpu: bool = False
) -> dict[str, Any]:
    """Configuration of a trained engine; ``zero_stage`` overrides that of ``options``.

    Accumulation boundaries are set by hand at each micro-batch, so DeepSpeed is given one micro-batch per step and
    never scales a loss. With bf16, gradients are accumulated and reduced in float32; a single rank of ZeRO-2, which has
    nothing to reduce, skips the copy. ``n_trained`` parameters bound the reduction buckets, which DeepSpeed would
    otherwise allocate for 500 million elements. ``on_gpu`` pins offloaded memory, for faster copies, and
    overlaps the reduction by nccl with the backward pass.
    """
    even = n_trained + n_trained % 2  # DeepSpeed requires an even number
    bucket = min(max(2, even), LARGEST_BUCKET)
    zero: dict[str, Any] = {
        "stage": zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "zero_hpz_partition_size": options.zpg,
        # Below stage 3 DeepSpeed would still all-reduce, but would copy the bucket first.
        "reduce_scatter": zero_stage == 3,
    }
    # If it is not set here, DeepSpeed overlaps in stage 3 only.
    if options.overlap_comm != "auto" or (on_gpu and n_ranks > 1):
        zero["overlap_comm"] = options.overlap_comm != "off"
    if options.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}

    config: dict[str, Any] = {
        **_EVERY_ENGINE,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": options.max_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": options.bf16},
    }
    if options.bf16:
        skips_copy = zero_stage == 2 and n_ranks == 1
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "bf16" if skips_copy else "fp32"
    return config


def eval_config(bf16: bool) -> dict[str, Any]:
    """Configuration of a frozen model under ZeRO-3, or of a model that is being loaded."""
    return {**_EVERY_ENGINE, "zero_optimization": {"stage": 3}, "bf16": {"enabled": bf16}}


def merge(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Copy ``config`` with ``overrides`` laid over it, nested dictionaries key by key."""
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge(old, value)
        merged[key] = value
    return merged
