"""Launched by torchrun: ``run_faults.py FAULT RANK PHASE STEP COMMAND ...`` runs a command with a fault in its way.

When rank RANK enters PHASE in global step STEP it waits until its watch has told the others where it is, and then:
``kill`` (SIGKILL), ``segfault``, ``raise``, ``refuse`` (as for a mistake of the user), ``sleep`` (for ever), ``stop``
(SIGSTOP), ``hold`` (Python's lock, for ever), ``exhaust`` (more memory than the process may have), ``wait`` (for a
signal to the run). The fault comes once, and not again after a restart by torchrun.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from openppo.strategy import interrupt
from openppo.tracking.phase import Position, position

SECONDS_UNTIL_THE_OTHERS_KNOW = 1.5


def fail() -> None:
    raise RuntimeError("planted")


def refuse() -> None:
    raise ValueError("--pretrain: planted")


def sleep() -> None:
    while True:
        time.sleep(1)


def hold() -> None:
    while True:
        ctypes.PyDLL(None).sleep(10_000)  # PyDLL keeps the lock; a signal ends the sleep


def exhaust() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    torch.zeros(2**29)  # 2 GiB


def wait() -> None:
    while interrupt.requested() is None:
        time.sleep(0.05)


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "raise": fail,
    "refuse": refuse,
    "sleep": sleep,
    "wait": wait,
    "hold": hold,
    "exhaust": exhaust,
}


class Trap(Position):
    """The position of this process, with a fault at one place."""

    fault, place = "none", ("", -1)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "ticks" and (self.phase, self.step) == self.place and self.fault != "none":
            fault, type(self).fault = self.fault, "none"
            time.sleep(SECONDS_UNTIL_THE_OTHERS_KNOW)
            print(f"fault at {time.time()}", flush=True)
            FAULTS[fault]()


def main() -> None:
    """Plant the fault, then run the command."""
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]  # of the deepspeed launcher
    fault, rank, phase, step, command, *arguments = words
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        Trap.fault, Trap.place = fault, (phase, int(step))
        position.__class__ = Trap
    sys.argv = [command, *arguments]
    import_module(f"openppo.cli.{command}").main()


if __name__ == "__main__":
    main()
