"""The process group of commands that train nothing: whole models on every rank, without DeepSpeed."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn

from openppo.strategy.comm import TorchComm, init_process_group
from openppo.strategy.gpu import set_up_gpu


class InferenceStrategy:
    """One process, or several under torchrun, each with its own GPU if there are any and its share of the data."""

    def __init__(self, bf16: bool, timeout: timedelta = timedelta(hours=24)) -> None:  # ranks meet at the very end only
        self.device = init_process_group(timeout)
        set_up_gpu(bf16)
        self.comm = TorchComm()

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.comm.rank == 0

    def prepare_frozen(self, module: nn.Module) -> nn.Module:
        """A module for evaluation only, on this rank's device."""
        module.requires_grad_(False)
        return module.eval().to(self.device)

    def close(self) -> None:
        """Leave the process group, all ranks together."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
