"""Ranks and devices of a run, and the memory on each that libraries take for themselves."""

from collections import Counter
from dataclasses import dataclass

from openppo.config import DeepSpeedConfig

Terms = Counter[str]
"""Bytes by name, which add up."""
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
        return _CONTEXT if self.n_ranks == 1 else _CONTEXT + _COMMUNICATORS

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
