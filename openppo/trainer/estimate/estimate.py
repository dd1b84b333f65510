"""The estimate: what each model takes, the peak of each phase, and what would lower it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class Phase:
    """Device memory at the peak of a phase: what lasts, and what comes and goes by name, in bytes."""

    name: str
    lasting: int
    passing: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return self.lasting + sum(self.passing.values())


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank, but ``checkpoint``, which is for all of them.

    ``roles`` has by model what lasts on the device, ``host`` what lies in the host's memory (on CPUs the phases include
    it), ``sent`` what a rank sends in a global step by phase. ``device_memory`` is None where it is not known.
    ``decode_rows`` is the number of responses decoded at the same time.
    ``changes`` are flags to change, as they are written, with a function that estimates the run with them.
    """

    roles: dict[str, dict[str, int]]
    phases: list[Phase]
    host: dict[str, int]
    sent: dict[str, int]
    checkpoint: int
    n_ranks: int
    decode_rows: int = 0
    device_memory: int | None = None
    changes: Sequence[tuple[str, Callable[[], Estimate]]] = ()

    @property
    def largest(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Most device memory that a rank needs at a time."""
        return self.largest.total

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes at the peak of each phase of a step, and of the whole ``step``."""
        in_step = {phase.name: phase.total for phase in self.phases if phase.name != "loading"}
        return in_step | {"step": max(in_step.values())}

    @property
    def fits(self) -> bool:
        """Whether the peak is below the device's memory; True where that is not known."""
        return self.device_memory is None or self.peak <= self.device_memory

    def lines(self) -> list[str]:
        """What each model takes on one rank, for people."""
        width = max(map(len, self.roles))
        return [
            f"{role:<{width}}  {readable(sum(parts.values())):>9}  {_listed(parts)}"
            for role, parts in self.roles.items()
        ]

    def explain(self) -> list[str]:
        """What each model takes, and which flags lower it."""
        return self.lines() + self.remedies()

    def summary(self) -> str:
        """What each model takes on one rank and the highest peak, in a line."""
        where = f" on each of {self.n_ranks} ranks" if self.n_ranks > 1 else ""
        roles = ", ".join(f"{role} {readable(sum(parts.values()))}" for role, parts in self.roles.items())
        return f"estimated memory{where}: {roles}; at most {readable(self.peak)}, in {self.largest.name}"

    def table(self) -> list[str]:
        """All of the estimate, for people."""
        width = max(len(name) for name in [*self.roles, *(phase.name for phase in self.phases)])
        lines = [f"memory of each of {self.n_ranks} ranks, estimated:" if self.n_ranks > 1 else "memory, estimated:"]
        lines += [f"  {line}" for line in self.lines()]
        if self.host:
            lines.append(f"  in the host's memory  {readable(sum(self.host.values()))}  {_listed(self.host)}")
        lines.append("peak of each phase:")
        for phase in self.phases:
            lines.append(f"  {phase.name:<{width}}  {readable(phase.total):>9}  {_listed(phase.passing)}")
        if self.device_memory is not None:
            verdict = "fits into" if self.fits else "DOES NOT FIT into"
            lines.append(f"the highest, {self.largest.name}, {verdict} {readable(self.device_memory)} of device memory")
        if any(self.sent.values()):
            lines.append(f"sent by each rank per step: {readable(sum(self.sent.values()))}  {_listed(self.sent)}")
        lines.append(f"checkpoint on disk: {readable(self.checkpoint)}")
        return lines

    def remedies(self) -> list[str]:
        """Flags to change for the highest phase, the most effective first, with what each alone would save there."""
        phase, saved = self.largest, []
        for change, other in self.changes:
            less = phase.total - max(p.total for p in other().phases if p.name == phase.name)
            if less > 0:
                saved.append((less, change))
        saved.sort(reverse=True)
        return [f"{change} saves {readable(less)} in {phase.name}" for less, change in saved]


def readable(n_bytes: int) -> str:
    """In GiB, or MiB below one."""
    return f"{n_bytes / _GIB:.1f} GiB" if n_bytes >= _GIB else f"{n_bytes / _MIB:.0f} MiB"


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size >= _MIB // 2)
