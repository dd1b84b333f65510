"""Launched: ``run_signals.py SECONDS`` waits under a watchdog for a signal, then "saves" for so long."""

import os
import sys
import time
from datetime import timedelta

import torch

from openppo.config import RunConfig
from openppo.strategy import signals
from openppo.strategy.comm import init_process_group
from openppo.strategy.watchdog import Watchdog
from openppo.tracking.phase import current, phase


def say(text: str) -> None:
    sys.stdout.write(f"rank {os.environ['RANK']} {os.getpid()} {text}\n")  # in one piece
    sys.stdout.flush()


with Watchdog(RunConfig(), current, {}) as watchdog:  # what a trainer does, in small
    init_process_group(timedelta(minutes=5))
    watchdog.save_on_signal()
    with phase("training"):
        say("works")
        while not signals.requested():
            time.sleep(0.05)
        say(f"was asked by {signals.requested()}")
        time.sleep(float(sys.argv[-1]))
        say("has saved")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
say("has left")
