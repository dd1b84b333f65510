"""Estimated memory of a run, from its options and its models' configs alone: the formulas of docs/memory.md.

States follow ZeRO (arXiv 1910.02054, section 3) with the buffers of DeepSpeed 0.19.8, activations arXiv 2205.05198.
"""

from dataclasses import dataclass
from typing import NamedTuple

from openppo.config import DeepSpeedConfig, LoRAConfig
from openppo.config.commands import SupervisedCommand
from openppo.models.log_probs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CPU, logits_at_once
from openppo.models.size import ModelSize
from openppo.strategy.ds_config import LARGEST_BUCKET
from openppo.tracking.console import table_lines

_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes of a 4-bit weight with its scales (arXiv 2305.14314)
_LIVE = 1_000_000_000  # elements that ZeRO-3 keeps gathered, and updates at a time
_CONTEXT, _COMMUNICATORS = (
    2**29,
    2**29,
)  # bytes of CUDA itself, and of NCCL's buffers: as published, not measured
_WORKSPACES = 2**28
"""Bytes that libraries allocate through torch: workspaces of products and copies. An H200 had 0.24 GiB of them."""
_EXPERIENCE = 42  # bytes of a token in an Experience


@dataclass(frozen=True)
class Machine:
    """Where a run takes place, and how models lie there; ``memory`` is in bytes on each rank."""

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
        """What a GPU's memory holds beside what torch allocates: CUDA's context, and NCCL's buffers."""
        return 0 if self.on_cpu else _CONTEXT + _COMMUNICATORS * (self.n_ranks > 1)

    @property
    def workspaces(self) -> int:
        """What libraries allocate in each phase that computes."""
        return 0 if self.on_cpu else _WORKSPACES

    @property
    def room(self) -> int:
        """Bytes that torch may allocate."""
        return max(0, self.memory - self.outside)

    def share(self, n: int) -> int:
        """One rank's part of ``n``."""
        return -(-n // self.n_ranks)

    def pinned(self, n: int, piece: int) -> int:
        """Host memory of ``n`` float32 numbers in tensors of ``piece``; torch pins powers of two of bytes."""
        pieces = [piece] * (n // piece) + [n % piece] if n > 0 else []
        return 4 * n if self.on_cpu else sum(1 << (4 * m - 1).bit_length() for m in pieces if m > 0)

    def live(self, gathered: int) -> int:
        """What a pass holds of so many bytes of gathered weights."""
        return min(gathered, self.element * _LIVE)


class ModelMemory(NamedTuple):
    """Bytes of one model on one rank."""

    lasting: int  # from the first optimizer step on
    moments: int = 0  # Adam's part of it
    resting: int = 0  # that part in the host's memory
    host: int = 0
    loading: int = 0  # above ``lasting`` without moments
    gradients: int = 0  # beside activations, as if each step had several micro-batches
    copies: int = 0  # of gradients, in an optimizer step
    gathered: int = 0  # whole weights under ZeRO-3


def model_memory(size: ModelSize, machine: Machine, lora: LoRAConfig | None = None) -> ModelMemory:
    """A model by ZeRO stage: with AdamW if ``lora`` is given, else only evaluated and partitioned by ZeRO-3 alone."""
    s = machine.element
    options = machine.options
    several = machine.n_ranks > 1
    if lora is None:
        weights = s * size.n_parameters
        partitioned = ModelMemory(machine.share(weights), gathered=weights * several)
        return partitioned if options.zero_stage == 3 else ModelMemory(weights)
    n, quantized = size.n_trained(lora.lora_rank), size.n_quantized if lora.load_in_4bit else 0
    frozen = (
        round(_NF4 * quantized) + s * (size.n_parameters - quantized)
        if lora.lora_rank > 0
        else s * size.n_frozen
    )
    stage = (
        max(options.zero_stage, 1) if options.bf16 else options.zero_stage
    )  # as DeepspeedStrategy has it
    weights = frozen + s * n
    share = machine.share(n)
    bucket = 4 * min(n, LARGEST_BUCKET)
    if stage == 0:
        return ModelMemory(weights + 8 * n, 8 * n, 8 * n, gradients=4 * n, copies=bucket)
    away, two = options.adam_offload, 2 * machine.pinned(share, _LIVE if stage == 3 else share)
    # away: master weights, two moments, and gradients twice; two of these are pinned
    adam, moments, host = (
        (0, (0, 0), 12 * share + two) if away else (12 * share, (8 * share, two), 0)
    )
    if stage == 3:
        kept, copied = (0, 0) if away else (4 * share, 4 * min(share, _LIVE))
        lasting = machine.share(weights) + bucket + adam + kept
        return ModelMemory(
            lasting,
            *moments,
            host,
            weights * bool(quantized),
            0,
            bucket + copied,
            weights * several,
        )
    if stage == 1 and options.bf16 and not away:  # DeepSpeed's BF16_Optimizer keeps gradients
        return ModelMemory(weights + 6 * n + adam, *moments, loading=s * n)
    copies = bucket // 2 + bucket * several if options.bf16 else bucket + 4 * share
    return ModelMemory(
        weights + adam, *moments, host, s * n, 4 * (n if stage == 1 else share), copies
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
    """Peak of a pass over ``rows`` of ``length`` with logits at ``scored`` places and ``patches`` of images in each.

    ``saving`` is the number of layers that keep activations for a backward pass; 0: no gradient is computed.
    """
    patch = machine.element * size.patch_width * rows * patches
    s, hidden = machine.element, machine.element * size.hidden * rows * length
    layer, logits = s * size.width * rows * length, rows * scored * size.vocabulary
    kept = s if machine.on_cpu or size.whole_logits else 4  # GPUs compute them in float32
    logits = logits if size.whole_logits else min(logits, logits_at_once(machine.on_cpu))
    chunks = 8 * min(
        logits, CHUNK_ELEMENTS_ON_CPU if machine.on_cpu else CHUNK_ELEMENTS
    )  # two copies in float32
    if saving == 0:
        return 2 * hidden + max(kept * logits + chunks, layer // 2, patch // 2)
    checkpoints = hidden * size.layers if saving < size.layers else 0
    tower = patch * min(saving, size.patch_layers) if size.n_frozen < size.tower else patch // 2
    return 2 * hidden + checkpoints + saving * layer + tower + (kept + s) * logits + chunks


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank by role and at the peak of each phase; ``checkpoint`` is of all ranks.

    ``host`` is in the host's memory; phases of CPUs include it.
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
        """Whether the peak is below the device's memory, less what is outside of torch."""
        return self.phases[self.largest] <= self.machine.room

    def summary(self) -> str:
        """The models and the highest peak in a line."""
        most, on_each = (
            format_bytes(self.phases[self.largest]),
            f" on each of {self.machine.n_ranks} ranks",
        )
        roles = ", ".join(f"{role} {format_bytes(total)}" for role, total in self.roles.items())
        return f"estimated memory{on_each * (self.machine.n_ranks > 1)}: {roles}; at most {most}, in {self.largest}"

    def table(self, verdict: bool = True) -> list[str]:
        """The summary, phases and checkpoint; and the ``verdict``, whether they fit."""
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
    """In GiB, or MiB below one."""
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
    """Memory of training one model on examples of ``rows`` of ``longest`` tokens with at most ``scored`` logits.

    ``patches`` are those of images in a row.
    """
    (size,) = sizes.values()
    batch = config.batch
    n = config.batch.micro_rows
    model = model_memory(size, machine, config.lora)
    work = (
        rows * min(machine.share(batch.train_batch_size), n),
        longest,
        min(longest, scored * n),
        patches,
    )
    phases = {
        "loading": model.lasting - model.moments + model.loading,
        "training": machine.workspaces
        + model.lasting
        + model.host * machine.on_cpu
        + training_bytes(size, model, config.lora, machine, *work),
    }
    return Estimate(
        {"model": model.lasting},
        phases,
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
    """The larger of a backward pass and an optimizer step."""
    saving = 1 if machine.options.gradient_checkpointing else size.layers
    backward = pass_bytes(
        size, machine, rows, length=length, scored=scored, saving=saving, patches=patches
    )
    if not size.whole_logits and rows * scored * size.vocabulary > logits_at_once(machine.on_cpu):
        backward += (
            4 * size.vocabulary * size.hidden * (machine.options.bf16 and lora.lora_rank == 0)
        )  # in float32
    return model.gradients + max(backward, model.copies) + machine.live(model.gathered)
