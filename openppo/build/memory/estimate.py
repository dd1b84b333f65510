"""Estimated memory of a run from its options and model configs: the formulas of docs/memory.md.

States follow ZeRO (arXiv 1910.02054, section 3) with the buffers of DeepSpeed 0.19.8, activations arXiv 2205.05198.
"""

from dataclasses import dataclass
from typing import NamedTuple

from openppo.config import DeepSpeedConfig, LoRAConfig
from openppo.config.train_supervised import SupervisedCommand
from openppo.models.log_probs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CPU, logits_at_once
from openppo.models.size import ModelSize
from openppo.strategy.ds_config import LARGEST_BUCKET
from openppo.tracking.console import table_lines

_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a 4-bit weight with its scales (arXiv 2305.14314)."""
_LIVE = 1_000_000_000
"""Elements that ZeRO-3 keeps gathered, and updates at a time."""
_CONTEXT = 2**29
"""Bytes of the CUDA context: as published, not measured."""
_COMMUNICATORS = 2**29
"""Bytes of NCCL's buffers: as published, not measured."""
_WORKSPACES = 2**28
"""Bytes that libraries allocate through torch for products and copies; 0.24 GiB on an H200."""


@dataclass(frozen=True)
class Machine:
    """Ranks and devices of a run, with ``memory`` in bytes on each rank."""

    options: DeepSpeedConfig
    n_ranks: int = 1
    on_cpu: bool = False
    memory: int = 2**62

    @property
    def element(self) -> int:
        """Bytes of a weight or activation."""
        return 2 if self.options.bf16 else 4

    @property
    def outside(self) -> int:
        """Bytes of a GPU that torch does not allocate: the CUDA context, and NCCL's buffers."""
        if self.on_cpu:
            return 0
        if self.n_ranks == 1:
            return _CONTEXT
        return _CONTEXT + _COMMUNICATORS

    @property
    def workspaces(self) -> int:
        """Bytes that libraries allocate in each phase that computes."""
        return 0 if self.on_cpu else _WORKSPACES

    @property
    def room(self) -> int:
        """Bytes that torch may allocate."""
        return max(0, self.memory - self.outside)

    def per_rank(self, n: int) -> int:
        """One rank's part of ``n``, rounded up."""
        return -(-n // self.n_ranks)

    def pinned(self, n: int, piece: int) -> int:
        """Host bytes of ``n`` float32 numbers in tensors of ``piece``, pinned on GPUs."""
        if n <= 0:
            return 0
        if self.on_cpu:
            return 4 * n
        full_pieces, remainder = divmod(n, piece)
        total = full_pieces * _pinned_bytes(piece)
        return total + _pinned_bytes(remainder) if remainder else total

    def live(self, gathered: int) -> int:
        """Bytes that a pass holds at a time of ``gathered`` bytes of weights."""
        return min(gathered, self.element * _LIVE)


def _pinned_bytes(n: int) -> int:
    """Size of the pinned block for ``n`` > 0 float32 numbers: the next power of two."""
    return 1 << (4 * n - 1).bit_length()


class ModelMemory(NamedTuple):
    """Bytes of one model on one rank."""

    lasting: int
    """From the first optimizer step on."""
    moments: int = 0
    """Adam's moments, a part of ``lasting``."""
    resting: int = 0
    """The moments in the host's memory, with ``--offload_idle``."""
    host: int = 0
    """Optimizer states in the host's memory, with ``--adam_offload``."""
    loading: int = 0
    """While it loads, above ``lasting`` without moments."""
    gradients: int = 0
    """Beside activations, as if each step had several micro-batches."""
    copies: int = 0
    """Copies of gradients in an optimizer step."""
    gathered: int = 0
    """Whole weights under ZeRO-3."""


class _AdamMemory(NamedTuple):
    """Bytes of AdamW's master weights and moments on one rank under ZeRO; fields as in ``ModelMemory``."""

    device: int
    moments: int
    resting: int
    host: int


def model_memory(size: ModelSize, machine: Machine, lora: LoRAConfig | None = None) -> ModelMemory:
    """A model's memory by ZeRO stage: trained with AdamW if ``lora`` is given, else only evaluated."""
    if lora is None:
        return _evaluated_memory(size, machine)

    options = machine.options
    trained = size.n_trained(lora.lora_rank)
    new_weights = machine.element * trained
    weights = _frozen_bytes(size, machine, lora) + new_weights
    bucket = 4 * min(trained, LARGEST_BUCKET)
    # as DeepspeedStrategy has it
    stage = max(options.zero_stage, 1) if options.bf16 else options.zero_stage

    if stage == 0:
        moments = 8 * trained
        return ModelMemory(
            weights + moments,
            moments=moments,
            resting=moments,
            gradients=4 * trained,
            copies=bucket,
        )
    if stage == 3:
        is_quantized = lora.load_in_4bit and size.n_quantized > 0
        return _zero_3_memory(machine, trained, weights, is_quantized=is_quantized)

    per_rank = machine.per_rank(trained)
    adam = _adam_memory(machine, per_rank, piece=per_rank)
    lasting = weights + adam.device
    # DeepSpeed's BF16_Optimizer keeps gradients
    if stage == 1 and options.bf16 and not options.adam_offload:
        return ModelMemory(
            lasting + 6 * trained,
            moments=adam.moments,
            resting=adam.resting,
            loading=new_weights,
        )

    if not options.bf16:
        copies = bucket + 4 * per_rank
    elif machine.n_ranks > 1:
        copies = bucket // 2 + bucket
    else:
        copies = bucket // 2
    return ModelMemory(
        lasting,
        moments=adam.moments,
        resting=adam.resting,
        host=adam.host,
        loading=new_weights,
        gradients=4 * (trained if stage == 1 else per_rank),
        copies=copies,
    )


def _evaluated_memory(size: ModelSize, machine: Machine) -> ModelMemory:
    """Weights of a frozen model, which ZeRO-3 alone partitions."""
    weights = machine.element * size.n_parameters
    if machine.options.zero_stage != 3:
        return ModelMemory(weights)
    gathered = weights if machine.n_ranks > 1 else 0
    return ModelMemory(machine.per_rank(weights), gathered=gathered)


def _frozen_bytes(size: ModelSize, machine: Machine, lora: LoRAConfig) -> int:
    """Bytes of the weights that are not trained, in 4 bits with ``--load_in_4bit``."""
    if lora.lora_rank == 0:
        return machine.element * size.n_frozen
    quantized = size.n_quantized if lora.load_in_4bit else 0
    return round(_NF4 * quantized) + machine.element * (size.n_parameters - quantized)


def _adam_memory(machine: Machine, per_rank: int, piece: int) -> _AdamMemory:
    """AdamW of ``per_rank`` parameters, whose pinned tensors have ``piece`` elements."""
    two_pinned = 2 * machine.pinned(per_rank, piece)
    if not machine.options.adam_offload:
        return _AdamMemory(device=12 * per_rank, moments=8 * per_rank, resting=two_pinned, host=0)
    # master weights, two moments, and gradients twice; two of these are pinned
    return _AdamMemory(device=0, moments=0, resting=0, host=12 * per_rank + two_pinned)


def _zero_3_memory(machine: Machine, trained: int, weights: int, is_quantized: bool) -> ModelMemory:
    """A trained model with partitioned weights, gradients and states."""
    per_rank = machine.per_rank(trained)
    adam = _adam_memory(machine, per_rank, piece=_LIVE)
    bucket = 4 * min(trained, LARGEST_BUCKET)
    gradients = updated = 0
    if not machine.options.adam_offload:
        gradients = 4 * per_rank
        updated = 4 * min(per_rank, _LIVE)

    return ModelMemory(
        machine.per_rank(weights) + bucket + adam.device + gradients,
        moments=adam.moments,
        resting=adam.resting,
        host=adam.host,
        loading=weights if is_quantized else 0,
        copies=bucket + updated,
        gathered=weights if machine.n_ranks > 1 else 0,
    )


def pass_bytes(
    size: ModelSize,
    machine: Machine,
    rows: int,
    length: int,
    scored: int,
    saving: int = 0,
    patches: int = 0,
) -> int:
    """Peak of a pass over ``rows`` of ``length``, with logits at ``scored`` places of each.

    ``patches`` are those of a row's images. ``saving`` is the number of layers that keep activations for a backward
    pass; 0: no gradient is computed.
    """
    element = machine.element
    tokens = rows * length
    hidden = element * size.hidden * tokens
    layer = element * size.width * tokens
    patch = element * size.patch_width * rows * patches

    n_logits = rows * scored * size.vocabulary
    if not size.whole_logits:
        n_logits = min(n_logits, logits_at_once(machine.on_cpu))
    # GPUs compute logits in float32
    logit = element if machine.on_cpu or size.whole_logits else 4
    chunk = CHUNK_ELEMENTS_ON_CPU if machine.on_cpu else CHUNK_ELEMENTS
    float32_copies = 8 * min(n_logits, chunk)  # two of a chunk

    if saving == 0:
        logits = logit * n_logits + float32_copies
        return 2 * hidden + max(logits, layer // 2, patch // 2)

    checkpoints = hidden * size.layers if saving < size.layers else 0
    trains_tower = size.n_frozen < size.tower
    tower = patch * min(saving, size.patch_layers) if trains_tower else patch // 2
    logits = (logit + element) * n_logits + float32_copies
    return 2 * hidden + checkpoints + saving * layer + tower + logits


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank by role and at the peak of each phase.

    ``checkpoint`` is of all ranks. ``host`` is in the host's memory; phases of CPUs include it.
    """

    roles: dict[str, int]
    phases: dict[str, int]
    host: int
    checkpoint: int
    machine: Machine

    @property
    def largest(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of each phase of a step, and of the whole ``step``."""
        in_step = {name: total for name, total in self.phases.items() if name != "loading"}
        return in_step | {"step": max(in_step.values())}

    @property
    def fits(self) -> bool:
        """True if the peak is below the memory that torch may allocate."""
        return self.phases[self.largest] <= self.machine.room

    @property
    def spare(self) -> int:
        """Bytes that stay free on the device at the highest peak, a tenth of it held in reserve."""
        return self.machine.room * 9 // 10 - self.phases[self.largest]

    def summary(self) -> str:
        """The models and the highest peak in a line."""
        n_ranks = self.machine.n_ranks
        ranks = f" on each of {n_ranks} ranks" if n_ranks > 1 else ""
        roles = ", ".join(f"{role} {format_bytes(total)}" for role, total in self.roles.items())
        peak = format_bytes(self.phases[self.largest])
        return f"estimated memory{ranks}: {roles}; at most {peak}, in {self.largest}"

    def table(self, verdict: bool = True) -> list[str]:
        """The summary, phases and checkpoint; with ``verdict`` a line on whether they fit."""
        rows = {f"peak in {phase}": total for phase, total in self.phases.items()}
        if self.machine.outside:
            rows["outside of PyTorch"] = self.machine.outside
        rows |= {"in the host's memory": self.host, "checkpoint on disk": self.checkpoint}
        lines = table_lines([(name, format_bytes(total)) for name, total in rows.items()])
        if verdict:
            fits = "fits" if self.fits else "DOES NOT FIT"
            memory = format_bytes(self.machine.memory)
            lines.append(f"the highest, {self.largest}, {fits} into {memory} of device memory")
        return [self.summary(), *lines]


def format_bytes(n_bytes: int) -> str:
    """``n_bytes`` in GiB, or MiB below one."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def estimate_supervised(
    config: SupervisedCommand,
    longest: int,
    rows: int,
    scored: int,
    patches: int,
    sizes: dict[str, ModelSize],
    machine: Machine,
) -> Estimate:
    """Estimate the training of one model on examples of ``rows`` of ``longest`` tokens.

    An example has at most ``scored`` logits, and a row ``patches`` of images.
    """
    (size,) = sizes.values()
    batch = config.batch
    model = model_memory(size, machine, config.lora)
    step = training_bytes(
        size,
        model,
        config.lora,
        machine=machine,
        rows=rows * min(machine.per_rank(batch.train_batch_size), batch.micro_rows),
        length=longest,
        scored=min(longest, scored * batch.micro_rows),
        patches=patches,
    )
    training = machine.workspaces + model.lasting + step
    if machine.on_cpu:
        training += model.host
    loading = model.lasting - model.moments + model.loading
    return Estimate(
        {"model": model.lasting},
        {"loading": loading, "training": training},
        model.host,
        checkpoint=12 * size.n_trained(config.lora.lora_rank),
        machine=machine,
    )


def training_bytes(
    size: ModelSize,
    model: ModelMemory,
    lora: LoRAConfig,
    machine: Machine,
    rows: int,
    length: int,
    scored: int,
    patches: int,
) -> int:
    """Peak of a backward pass or an optimizer step, the larger of them, above what lasts."""
    options = machine.options
    saving = 1 if options.gradient_checkpointing else size.layers
    backward = pass_bytes(
        size, machine, rows, length=length, scored=scored, saving=saving, patches=patches
    )

    n_logits = rows * scored * size.vocabulary
    in_chunks = not size.whole_logits and n_logits > logits_at_once(machine.on_cpu)
    if in_chunks and options.bf16 and lora.lora_rank == 0:
        backward += 4 * size.vocabulary * size.hidden  # the head's gradient in float32
    return model.gradients + max(backward, model.copies) + machine.live(model.gathered)
