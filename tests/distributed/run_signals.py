"""Launched by torchrun or deepspeed: ``run_signals.py SECONDS`` waits under a watch for a signal, then "saves"."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch

from openppo.config import RunConfig
from openppo.strategy import interrupt
from openppo.strategy.comm import init_process_group
from openppo.strategy.watch import Watch
from openppo.tracking.phase import phase, position


def say(text: str) -> None:
    sys.stdout.write(f"rank {os.environ['RANK']} {os.getpid()} {text} {time.time()}\n")  # in one piece
    sys.stdout.flush()


def main() -> None:
    """What a trainer does, in small."""
    with Watch(RunConfig(), position, {}):
        init_process_group(timedelta(minutes=5))
        with interrupt.deferred(), phase("training"):
            say("works")
            while not interrupt.requested():
                time.sleep(0.05)
            say(f"was asked by {interrupt.requested()}")
            time.sleep(float(sys.argv[-1]))
            say("has saved")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    say("has left")


if __name__ == "__main__":
    main()
