"""Launched: ``run_faults.py FAULT RANK PHASE STEP COMMAND ...`` runs a command with a fault in its way.

When rank RANK is in PHASE of global step STEP it waits until its watchdog has sent that position, and then meets the
fault. It comes once, and not again after a restart by torchrun.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import _get_default_store

from openppo.strategy import signals
from openppo.tracking.phase import current

SECONDS_UNTIL_THE_OTHERS_KNOW = 1.5


def fail(error: BaseException) -> None:
    raise error


def sleep() -> None:
    while True:
        time.sleep(1)


def lag() -> None:
    """Stop before a collective in which rank 0 waits as on a GPU, where it reads a result: in no frame of torch's."""
    if os.environ["RANK"] == "0":
        started = torch.distributed.all_reduce(torch.zeros(1), async_op=True)
        while not started.is_completed():
            time.sleep(0.1)
    time.sleep(3)
    current.progress()  # later than rank 0, which idles longer
    sleep()


def hold() -> None:
    """Hold Python's lock."""
    while True:
        ctypes.PyDLL(None).sleep(10_000)  # PyDLL keeps the lock; a signal ends the sleep


def exhaust() -> None:
    """Ask for more memory than the process may have."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    torch.zeros(2**29)  # 2 GiB


def wait_in_store() -> None:
    """Hold the lock of the training thread's store client."""
    _get_default_store().wait(["never set"], timedelta(hours=1))


def wait_for_signal() -> None:
    while signals.requested() is None:
        time.sleep(0.05)


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "raise": lambda: fail(RuntimeError("planted")),
    "sleep": sleep,
    "lag": lag,
    "hold": hold,
    "exhaust": exhaust,
    "wait_in_store": wait_in_store,
    "wait_for_signal": wait_for_signal,
}


def main() -> None:
    """Plant the fault, then run the command."""
    words = [
        word for word in sys.argv[1:] if not word.startswith("--local_rank")
    ]  # of the deepspeed launcher
    fault, rank, phase, step, command, *arguments = words

    progress = current.progress

    def meet() -> None:
        progress()
        if (current.phase, str(current.step)) == (phase, step):
            current.progress = progress
            time.sleep(SECONDS_UNTIL_THE_OTHERS_KNOW)
            print(f"fault at {time.time()}", flush=True)
            FAULTS[fault]()

    meets = fault == "lag" or os.environ.get("RANK", "0") == rank
    if meets and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        current.progress = meet
    sys.argv = [command, *arguments]
    import_module(f"openppo.cli.{command}").main()


if __name__ == "__main__":
    main()
