"""The process group: start it, and combine values over ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LONGEST_START = timedelta(minutes=10)
"""For all ranks to be there: they import the same libraries, some from a slower disk."""


def init_process_group(timeout: timedelta) -> torch.device:
    """Join the group that torchrun describes in the environment, or make one of a single process.

    gloo carries CPU tensors and Python objects, nccl carries CUDA tensors. Returns this rank's device.
    ``ValueError`` if there are fewer GPUs than ranks on this machine, if a rank does not come, or if the launcher's
    restarts cannot work.
    """
    alone = "RANK" not in os.environ
    if alone:  # the other variables of torchrun would make ranks of the programs that this one starts
        os.environ["LOCAL_RANK"] = "0"
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"--nproc_per_node asks for more ranks than the {torch.cuda.device_count()} GPUs that are visible; use "
                "as many, or set CUDA_VISIBLE_DEVICES= to run on CPUs."
            )
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if not dist.is_initialized():
        backend, patience = "cpu:gloo,cuda:nccl" if cuda else "gloo", min(timeout, _LONGEST_START)
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            return device
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            store = _store_of_restarts(patience) or next(dist.rendezvous("env://", timeout=patience))[0]
        except dist.DistNetworkError as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ValueError(
                f"rank 0 was not reached at {address} within {patience.total_seconds():.0f} s: see what its host "
                "printed, and whether the port is open."
            ) from error
        _wait_for_all(store, rank, world_size, patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return device


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Raise ``ValueError`` naming the ranks that are not there in time.

    A rank of another host that ended before, say for a mistyped flag, would be waited for in silence otherwise.
    """
    keys = [f"openppo/arrived/{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise ValueError(
            f"rank {missing} of {world_size} did not start within {timeout.total_seconds():.0f} s: see what it printed "
            "on its host. All hosts need the same --nnodes and --master_addr, and each its own --node_rank."
        ) from error


def _store_of_restarts(timeout: timedelta) -> dist.Store | None:
    """A part of torchrun's store for the group of this start of the run; None where there are no restarts.

    torchrun keeps its store over restarts, and with it the addresses of ranks that are gone, for which a new group
    would wait (pytorch issue 135712). The number of restarts, which tells the groups apart, is known on one host only.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        return None
    if os.environ["GROUP_WORLD_SIZE"] != "1":
        raise ValueError(
            "--max_restarts on several hosts: start torchrun with --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:PORT "
            "and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all of them, or restarted ranks would wait for those that are "
            "gone."
        )
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
    return dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


class TorchComm:
    """``openppo.types.Comm`` over the default torch process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Combine over all ranks, ``op`` one of sum, max, min; returns a new tensor on the same device."""
        result = tensor.clone()
        dist.all_reduce(result, _OPS[op])
        return result

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; carried by gloo through CPU memory."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered
