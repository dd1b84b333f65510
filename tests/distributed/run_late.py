"""Launched: rank 1 has work left when rank 0 has ended."""

import os
import time
from datetime import timedelta

import torch

from openppo.config import RunConfig
from openppo.strategy.comm import init_process_group
from openppo.strategy.watchdog import Watchdog
from openppo.tracking.phase import current

with Watchdog(RunConfig(), current, {}):
    init_process_group(timedelta(minutes=5))
    time.sleep(2)  # until the watchdogs know each other
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if os.environ["RANK"] == "1":
        time.sleep(5)
os._exit(0)  # at once, as commands do
