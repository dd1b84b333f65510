"""What a model's states take on one rank: weights, gradients, optimizer states, and DeepSpeed's buffers, in bytes.

The sums of ZeRO (arXiv 1910.02054, section 3: 2 + 2 + 12 bytes per parameter in mixed precision, divided by the ranks
where a stage partitions them), with what DeepSpeed 0.19.8 really allocates: each stage names the file of DeepSpeed's
``runtime`` folder that shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from openppo.config import DeepSpeedConfig
from openppo.models.padding import rounded_width
from openppo.strategy.ds_config import LARGEST_BUCKET
from openppo.trainer.estimate.shapes import ModelShape

_FLOAT32 = 4
_ADAM = 8  # two float32 moments
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""A weight, its part of the 8-bit scale of 64, and of the float32 scale of 256 such scales (arXiv 2305.14314)."""
_LIVE_UNDER_ZERO_3 = 1_000_000_000
"""Elements that may stay gathered: ``stage3_max_live_parameters``."""
_PREFETCHED = 50_000_000
"""Elements: ``stage3_prefetch_bucket_size``."""
_SUB_GROUP = 1_000_000_000
"""Elements that ZeRO-3 updates at a time: ``sub_group_size``."""


@dataclass(frozen=True)
class Setting:
    """How models are kept: options, ranks, and whether the device is the CPU, whose memory is also the host's."""

    options: DeepSpeedConfig
    n_ranks: int
    on_cpu: bool = False

    @property
    def zero_stage(self) -> int:
        """That of the engines: ``DeepspeedStrategy`` turns stage 0 with bf16 into stage 1."""
        return 1 if self.options.bf16 and self.options.zero_stage == 0 else self.options.zero_stage

    @property
    def element(self) -> int:
        """Bytes of a weight or activation."""
        return 2 if self.options.bf16 else 4

    def width(self, length: int) -> int:
        """Places of a padded row of ``length`` tokens: see ``pad_width``."""
        return rounded_width(length) if self.on_cpu and self.options.bf16 else length

    def share(self, n: int) -> int:
        """Elements of one rank's partition of ``n``."""
        return -(-n // self.n_ranks)


@dataclass(frozen=True)
class States:
    """Bytes on one rank.

    ``device`` and ``host`` last from the first optimizer step on. Others come and go on the device: ``accumulated``
    gradients of earlier micro-batches and ``buffers`` during a backward pass, ``reduced`` at its end (all gradients and
    copies of them), ``update`` in an optimizer step; whole weights under ZeRO-3, ``gathered`` in a training pass,
    ``gathered_to_infer`` in a pass without gradients, ``gathered_to_generate`` for a rollout. ``loading`` is what
    wrapping takes above ``device`` less the moments.
    """

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    accumulated: int = 0
    buffers: int = 0
    reduced: int = 0
    update: int = 0
    gathered: int = 0
    gathered_to_infer: int = 0
    gathered_to_generate: int = 0
    loading: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device that last."""
        return sum(self.device.values())


def n_trained(shape: ModelShape, lora_rank: int) -> int:
    """Trained parameters: all, or with LoRA the adapters and a scalar head."""
    if lora_rank == 0:
        return shape.n_parameters
    return sum(shape.adapter_sizes(lora_rank)) + (0 if shape.vocabulary else shape.hidden)


def weight_bytes(shape: ModelShape, element: int, in_4bit: bool = False) -> int:
    """Bytes of a model's weights, of ``element`` bytes each but for those in 4 bits."""
    quantized = shape.n_quantized if in_4bit else 0
    return round(_NF4 * quantized) + element * (shape.n_parameters - quantized)


def frozen_states(shape: ModelShape, setting: Setting) -> States:
    """A model that is only evaluated: partitioned under ZeRO-3 alone."""
    s, whole = setting.element, setting.element * shape.n_parameters
    if setting.zero_stage < 3:
        return States({"weights": whole})
    weights = s * setting.share(shape.n_parameters)
    kept = s * shape.n_small if setting.n_ranks > 1 else 0
    return States({"weights": weights + kept}, gathered_to_infer=_to_infer(shape, setting), loading=whole)


def trained_states(
    shape: ModelShape, setting: Setting, lora_rank: int = 0, in_4bit: bool = False, accumulates: bool = True
) -> States:
    """A model and its AdamW optimizer under the engine that ``DeepspeedStrategy.prepare`` makes.

    ``accumulates`` says whether an optimizer step has several micro-batches.
    """
    trained = n_trained(shape, lora_rank)
    frozen = weight_bytes(shape, setting.element, in_4bit) if lora_rank else 0
    if setting.zero_stage == 3:
        return _stage_3(shape, setting, lora_rank)
    if setting.zero_stage == 0:
        gradients, bucket = 4 * trained, 4 * min(trained, LARGEST_BUCKET)
        device = {"weights": frozen + 4 * trained, "Adam moments": _ADAM * trained}
        return States(device, accumulated=gradients if accumulates else 0, reduced=gradients + bucket)  # engine.py
    if setting.options.bf16 and setting.zero_stage == 1 and not setting.options.adam_offload:
        return _bf16_stage_1(trained, frozen, setting)
    largest = max(shape.adapter_sizes(lora_rank), default=0) if lora_rank else shape.largest
    if setting.zero_stage == 1:
        return _stage_1(trained, frozen, largest, setting, accumulates)
    return _stage_2(trained, frozen, largest, setting, accumulates)


def _bf16_stage_1(n: int, frozen: int, setting: Setting) -> States:
    """bf16_optimizer.py: bf16 gradients beside whole float32 ones, and neither is ever freed."""
    p = setting.share(n)
    device = {"weights": frozen + 2 * n, "master weights": 4 * p, "Adam moments": _ADAM * p, "gradients": (2 + 4) * n}
    return States(device, loading=2 * n)


def _stage_1(n: int, frozen: int, largest: int, setting: Setting, accumulates: bool) -> States:
    """zero/stage_1_and_2.py: whole gradients in float32, which move into a bucket at the end of the last pass.

    It is reduced in place; then a rank copies what it keeps, which is whole parameters.
    """
    bucket, kept = 4 * min(n, LARGEST_BUCKET), 4 * min(n, max(setting.share(n), largest))
    buffers = bucket * (2 if setting.options.overlap_comm else 1)
    return _flat_states(
        n,
        frozen,
        setting,
        accumulated=4 * n if accumulates else 0,
        buffers=buffers,
        reduced=4 * n + max(buffers, kept),
        host_gradients=kept,
    )


def _stage_2(n: int, frozen: int, largest: int, setting: Setting, accumulates: bool) -> States:
    """zero/stage_1_and_2.py: gradients go through a bucket in every pass, and a rank keeps its part.

    With bf16 several ranks copy the bucket to float32, and the part kept is exactly the partition. Otherwise it is
    reduced in place, and whole parameters are kept, twice while passes add up.
    """
    bucket = min(n, LARGEST_BUCKET)
    buffers = setting.element * bucket * (2 if setting.options.overlap_comm else 1)
    if setting.options.bf16:
        kept = 4 * setting.share(n)
        accumulated, host_gradients = (kept if accumulates else 0), 0
        reduced = buffers + kept + (4 * bucket if setting.n_ranks > 1 else 0)
    else:
        kept = host_gradients = 4 * min(n, max(setting.share(n), largest))
        accumulated = kept if accumulates and not setting.options.adam_offload else 0
        reduced = accumulated + buffers + kept
    return _flat_states(n, frozen, setting, accumulated, buffers, reduced, host_gradients)


def _flat_states(
    n: int, frozen: int, setting: Setting, accumulated: int, buffers: int, reduced: int, host_gradients: int
) -> States:
    """Flat weights, and a float32 copy of this rank's partition: of float32 weights too."""
    s, p = setting.element, setting.share(n)
    device = {"weights": frozen + s * n}
    optimizer = {"master weights": 4 * p, "Adam moments": _ADAM * p}
    host: dict[str, int] = {}
    update = 0 if setting.options.bf16 else 2 * 4 * p  # gradients, and once more as one flat tensor
    if setting.options.adam_offload:
        host = {**optimizer, "gradients": 4 * p + host_gradients, "weights on their way": s * p}
        optimizer, update = {}, 0
    return States(device | optimizer, host, accumulated, buffers, reduced, update, loading=s * n)


def _stage_3(shape: ModelShape, setting: Setting, lora_rank: int) -> States:
    """zero/stage3.py: all partitioned, but small parameters; gradients and a float32 bucket are never freed.

    float32 weights have a master copy too: ``_create_fp32_partitions`` would share them where devices are equal, but
    compares a device with its name. DeepSpeed may keep up to a thousand million elements gathered while a model
    trains.
    """
    s, options, n = setting.element, setting.options, n_trained(shape, lora_rank)
    p, bucket = setting.share(n), 4 * min(n, LARGEST_BUCKET)
    total = shape.n_parameters + sum(shape.adapter_sizes(lora_rank))
    alone = setting.n_ranks == 1
    weights = s * setting.share(total) + (0 if alone else s * shape.kept_whole(lora_rank))
    if options.zpg > 1:
        weights += s * total // options.zpg
    optimizer = {"master weights": 4 * p, "Adam moments": _ADAM * p, "gradients": 4 * p}
    host: dict[str, int] = {}
    if options.adam_offload:
        host, optimizer = {**optimizer, "gradients to step with": 4 * p}, {}
    return States(
        {"weights": weights, **optimizer, "bucket": bucket},
        host,
        reduced=bucket,  # its parts in the order of the ranks
        update=0 if options.adam_offload else 4 * min(p, _SUB_GROUP),
        gathered=0 if alone else s * min(total, _LIVE_UNDER_ZERO_3),
        gathered_to_infer=_to_infer(shape, setting),
        gathered_to_generate=0 if alone else s * total,
        loading=s * total,
    )


def _to_infer(shape: ModelShape, setting: Setting) -> int:
    """Weights that ZeRO-3 gathers at a time when no backward pass will need them again."""
    if setting.n_ranks == 1:
        return 0
    return setting.element * min(shape.n_parameters, shape.largest + _PREFETCHED)


def step_moments(state: States, activations: int, on_cpu: bool, whose: str = "") -> list[dict[str, int]]:
    """What comes and goes at the beginning of a backward pass, at its end, and in the update of the weights."""
    gradients = state.accumulated + (0 if on_cpu else state.buffers)  # a CPU's memory is taken when it is written
    return [
        {
            f"activations and logits{whose}": activations,
            "gradients of earlier micro-batches": gradients,
            "gathered weights": state.gathered,
        },
        {f"gradients{whose}": state.reduced, "gathered weights": state.gathered},
        {f"gradients in the update{whose}": state.update},
    ]
