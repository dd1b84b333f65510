"""Stopping in the middle of a step, on all ranks at the same place."""

from __future__ import annotations

import torch

from openppo.strategy import signals
from openppo.types import Comm, Interrupted


class SignalStop:
    """``StopCheck`` that asks for signals; where no command has installed handlers for them, it never stops."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def requested(self) -> bool:
        """Whether this rank knows of a signal; others may not know yet."""
        return signals.requested() is not None

    def __call__(self) -> None:
        """Raise ``Interrupted`` on all ranks if one of them knows of a signal. All ranks call this together."""
        if not signals.installed():
            return
        if int(self.comm.all_reduce(torch.tensor(int(self.requested())), "max")):
            names = self.comm.all_gather_object(signals.requested())
            raise Interrupted(next(name for name in names if name is not None))
