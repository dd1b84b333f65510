"""Bytes that lie on a rank for one model: weights, gradients and AdamW's states by ZeRO stage.

They follow ZeRO (arXiv 1910.02054, section 3) with the buffers of DeepSpeed 0.19.8; docs/memory.md has the table.
"""

from dataclasses import dataclass

from openppo.build.memory.machine import Machine, Terms
from openppo.config import LoRAConfig
from openppo.models.size import ModelSize
from openppo.strategy.ds_config import LARGEST_BUCKET

_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight with its scales (arXiv 2305.14314)."""
_LIVE = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered, and updates at a time."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one model on one rank."""

    terms: Terms
    """Weights, optimizer and gradients that stay from the first optimizer step on."""
    moments: int
    """AdamW's moments, a part of the optimizer."""
    gradients: int
    """Beside activations, as if each step had several micro-batches."""
    copies: int
    """Copies of gradients in an optimizer step."""
    gathered: int
    """Whole weights under ZeRO-3."""
    live: int
    """Gathered weights that a pass holds at a time."""
    resting: int
    """Moments in the host's memory, with ``--offload_idle``."""
    host: int
    """Optimizer states in the host's memory, with ``--adam_offload``."""

    @property
    def lasting(self) -> int:
        """Bytes that stay from the first optimizer step on."""
        return self.terms.total()


def model_memory(size: ModelSize, machine: Machine, lora: LoRAConfig | None = None) -> ModelMemory:
    """A model's memory by ZeRO stage: trained with AdamW if ``lora`` is given, else only evaluated."""
    stage = machine.options.zero_stage
    if machine.options.bf16:
        stage = max(stage, 1)  # as DeepspeedStrategy has it

    weights = _weights(size, machine, lora)
    gathered = weights if stage == 3 and machine.n_ranks > 1 else 0
    if stage == 3:
        weights = machine.per_rank(weights)

    n_trained = 0 if lora is None else size.n_trained(lora.lora_rank)
    updated = n_trained if stage == 0 else machine.per_rank(n_trained)
    master_weights = 0 if stage == 0 else 4 * updated
    moments = 8 * updated
    resting = 2 * _pinned(updated, _LIVE if stage == 3 else updated, machine)
    host = 0
    if machine.options.adam_offload:
        # master weights, moments, and gradients twice; two of these four are pinned
        host = master_weights + moments + resting
        master_weights = moments = resting = 0

    kept_gradients, gradients, copies = _gradients(n_trained, stage, machine)
    terms = Terms(weights=weights, optimizer=master_weights + moments, gradients=kept_gradients)
    return ModelMemory(
        terms,
        moments=moments,
        gradients=gradients,
        copies=copies,
        gathered=gathered,
        live=min(gathered, machine.element * _LIVE),
        resting=resting,
        host=host,
    )


def _weights(size: ModelSize, machine: Machine, lora: LoRAConfig | None) -> int:
    """Bytes of a whole model with its adapters; frozen weights are in 4 bits with ``--load_in_4bit``."""
    if lora is None or lora.lora_rank == 0:
        return machine.element * size.n_parameters
    quantized = size.n_quantized if lora.load_in_4bit else 0
    others = size.n_parameters - quantized + size.n_trained(lora.lora_rank)
    return round(_NF4 * quantized) + machine.element * others


def _gradients(n_trained: int, stage: int, machine: Machine) -> tuple[int, int, int]:
    """Bytes of gradients that stay, that come and go, and that an optimizer step copies."""
    options = machine.options
    share = machine.per_rank(n_trained)
    bucket = min(n_trained, LARGEST_BUCKET)
    if stage == 0:
        return 0, 4 * n_trained, 4 * bucket
    if stage == 3 and options.adam_offload:
        return 4 * bucket, 0, 4 * bucket
    if stage == 3:
        return 4 * (bucket + share), 0, 4 * (bucket + min(share, _LIVE))
    if stage == 1 and options.bf16 and not options.adam_offload:
        return 6 * n_trained, 0, 0  # DeepSpeed's BF16_Optimizer

    gradients = 4 * (n_trained if stage == 1 else share)
    if not options.bf16:
        return 0, gradients, 4 * (bucket + share)
    return 0, gradients, 6 * bucket if machine.n_ranks > 1 else 2 * bucket


def _pinned(n: int, largest: int, machine: Machine) -> int:
    """Host bytes of ``n`` float32 numbers in tensors of at most ``largest``; on GPUs in blocks of powers of two."""
    if machine.on_cpu or n == 0:
        return 4 * n
    n_full, last = divmod(n, largest)
    return n_full * _power_of_two(4 * largest) + _power_of_two(4 * last)


def _power_of_two(n_bytes: int) -> int:
    """The next power of two; 0 of nothing."""
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0
