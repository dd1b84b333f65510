"""Estimated memory of a run by role and phase, as logs and reports show it."""

from collections.abc import Iterable
from dataclasses import dataclass

from openppo.build.memory.machine import Machine, Terms
from openppo.build.memory.passes import Batch, Model
from openppo.config.train_supervised import SupervisedCommand
from openppo.models.size import ModelSize
from openppo.tracking.console import table_lines


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank by role, and terms that make up the peak of each phase.

    ``checkpoint`` is of all ranks. ``host`` is in the host's memory; phases of CPUs include it.
    """

    roles: dict[str, int]
    terms: dict[str, Terms]
    host: int
    checkpoint: int
    machine: Machine

    @property
    def phases(self) -> dict[str, int]:
        """Bytes at the peak of each phase."""
        return {phase: terms.total() for phase, terms in self.terms.items()}

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
        """The summary, phases and terms of the highest one; with ``verdict`` a line on whether it fits."""
        rows = {f"peak in {phase}": total for phase, total in self.phases.items()}
        if self.machine.outside:
            rows["outside of PyTorch"] = self.machine.outside
        rows |= {"in the host's memory": self.host, "checkpoint on disk": self.checkpoint}
        lines = table_lines([(name, format_bytes(total)) for name, total in rows.items()])

        terms = self.terms[self.largest].most_common()
        parts = ", ".join(f"{name} {format_bytes(total)}" for name, total in terms)
        lines.append(f"parts of {self.largest}: {parts}")
        if verdict:
            fits = "fits" if self.fits else "DOES NOT FIT"
            memory = format_bytes(self.machine.memory)
            lines.append(f"the highest, {self.largest}, {fits} into {memory} of device memory")
        return [self.summary(), *lines]


def format_bytes(n_bytes: int) -> str:
    """``n_bytes`` in GiB, or MiB below one."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def loading_terms(models: Iterable[Model]) -> Terms:
    """Terms of all ``models`` before the first step, without moments."""
    terms = Terms()
    for model in models:
        terms += model.memory.terms - Terms(optimizer=model.memory.moments)
    return terms


def estimate_supervised(
    config: SupervisedCommand,
    example: Batch,
    size: ModelSize,
    machine: Machine,
) -> Estimate:
    """Estimate the training of one model; ``example`` is as large as the rows of an example are at most."""
    model = Model(size, machine, config.lora)
    memory = model.memory
    micro_rows = config.batch.micro_rows
    n_examples = min(machine.per_rank(config.batch.train_batch_size), micro_rows)
    scored = min(example.length, example.scored * micro_rows)
    batch = example._replace(rows=example.rows * n_examples, scored=scored)

    training = memory.terms + model.step(batch) + Terms(workspaces=machine.workspaces)
    if machine.on_cpu:
        training += Terms({"offloaded optimizer": memory.host})
    return Estimate(
        {"model": memory.lasting},
        {"loading": loading_terms([model]), "training": training},
        memory.host,
        checkpoint=12 * model.n_trained,
        machine=machine,
    )
