"""Process group and device of a rank: join, combine values, raise alike on all ranks, leave."""

import atexit
import dataclasses
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openppo import logger
from openppo.strategy.fused_kernels import fuse_kernels, has_kernels
from openppo.strategy.launcher_summary import record_uncaught
from openppo.strategy.worlds import Launch
from openppo.types import Comm

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_LONGEST_START = timedelta(minutes=10)
"""Limit for all ranks to arrive: they import the same libraries, some from a slower disk."""


def init_process_group(timeout: timedelta, rollout_ranks: int = 0) -> tuple[torch.device, Launch]:
    """Join the group that torchrun describes in the environment, or make one of a single process.

    The last ``rollout_ranks`` have a group of their own. Returns this rank's device and its place in the launch, whose
    ``store`` is the store of the rendezvous, or the one that survives restarts. ``ValueError`` if there are fewer GPUs
    than ranks on this machine, if a rank does not arrive, or if the launcher's restarts cannot work.
    """
    alone = "RANK" not in os.environ
    if alone:
        # The other variables of torchrun would turn programs that this one starts into ranks.
        os.environ["LOCAL_RANK"] = "0"
    if not dist.is_initialized():
        record_uncaught()

    device, backend = _device_and_backend(int(os.environ["LOCAL_RANK"]))
    if dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        return device, Launch(rank, world_size, 0, timeout=timeout, store=dist.HashStore())

    rank = 0
    world_size = 1
    store: dist.Store = dist.HashStore()
    if not alone:
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        store = _join_store(rank, world_size, min(timeout, _LONGEST_START))
    launch = Launch(rank, world_size, rollout_ranks, timeout=timeout, store=store)
    launch.join(backend)
    return device, launch


def _device_and_backend(local_rank: int) -> tuple[torch.device, str]:
    """Return this rank's GPU, or the CPU, and the backend of collectives.

    ``ValueError`` if there are fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"--nproc_per_node asks for more ranks than the {torch.cuda.device_count()} GPUs that are visible; use "
            "as many, or set CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"


def _join_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store of all ranks once they have arrived; ``ValueError`` naming those that have not.

    Without this, ranks would wait in silence for a host that ended early, for example on a mistyped flag.
    """
    try:
        store = _store_of_restarts(timeout) or next(dist.rendezvous("env://", timeout=timeout))[0]
    except dist.DistNetworkError as error:
        raise ValueError(
            f"rank 0 was not reached at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{timeout.total_seconds():.0f} s: see what its host printed, and whether the port is open."
        ) from error

    keys = [f"openppo/arrived/{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise ValueError(
            f"rank {', '.join(missing)} of {world_size} did not start within {timeout.total_seconds():.0f} s: see what "
            "it printed on its host. All hosts need the same --nnodes and --master_addr, and each its own --node_rank."
        ) from error
    return store


def _store_of_restarts(timeout: timedelta) -> dist.Store | None:
    """Return a part of torchrun's store for this start of the run; None without restarts.

    torchrun keeps its store over restarts, and with it the addresses of dead ranks, for which a new group would wait
    (pytorch issue 135712). The number of restarts, which tells the groups apart, is known on one host only.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS") == "0":
        return None
    if os.environ["GROUP_WORLD_SIZE"] != "1":
        raise ValueError(
            "--max_restarts on several hosts needs torchrun's --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:PORT and "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all of them."
        )

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, timeout=timeout)
    return dist.PrefixStore(f"restart_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


class TorchComm:
    """``openppo.types.Comm`` over the default torch process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result, _OPS[op])
        return result

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order; gloo carries them through CPU memory."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def collective(
    comm: Comm,
    work: Callable[[], T],
    errors: type[Exception] | tuple[type[Exception], ...] = ValueError,
    raised: Callable[[str], Exception] = ValueError,
) -> T:
    """Return ``work()`` on every rank; if one rank raises one of ``errors``, all ranks raise.

    ``raised`` makes the exception from the first message, which follows the failed ranks and hosts unless all failed.
    """
    result = None
    error = None
    try:
        result = work()
    except errors as caught:
        error = caught

    messages = comm.all_gather_object(None if error is None else str(error))
    failed = [rank for rank, message in enumerate(messages) if message is not None]
    if failed:
        place = "" if len(failed) == comm.world_size else f"on {name_ranks(comm, failed)}: "
        raise raised(place + messages[failed[0]]) from error
    return cast(T, result)


def check_same(comm: Comm, contents: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if ranks have read different ``contents``, which are named by their flags."""
    if comm.world_size == 1:
        return

    for flag, content in contents.items():
        text = json.dumps(content, default=_plain)
        digests = comm.all_gather_object(sha256(text.encode()).digest())
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not others:
            continue
        ranks = name_ranks(comm, others)
        remedy = "make it alike on all ranks"
        if flag.startswith("--"):
            remedy = "copy the same file to all hosts"
        raise ValueError(f"{flag} holds something else on {ranks} than on rank 0: {remedy}.")


def _plain(value: Any) -> Any:
    """Return the fields of a dataclass, else the name of the type, which JSON can hold."""
    return vars(value) if dataclasses.is_dataclass(value) else type(value).__name__


def name_ranks(comm: Comm, ranks: Sequence[int]) -> str:
    """Return ``ranks`` with the names of their hosts, for messages; collective."""
    hosts = comm.all_gather_object(socket.gethostname())
    return ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks)


def set_up_gpu(bf16: bool) -> None:
    """Disable cuDNN attention, and log on a GPU that float32 is slow."""
    # cuDNN plans each new shape for up to a second; its gradients under a mask may be NaN (pytorch issue 196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available() and not bf16:
        logger.info(
            "float32 is slow on a GPU and takes twice the memory of bfloat16: --bf16 computes in bfloat16."
        )


class InferenceStrategy:
    """Process group of commands that do not train: whole models on every rank, without DeepSpeed.

    Under torchrun each rank has its own GPU, if there are any, and its share of the data. ``timeout`` is long by
    default, since ranks wait for each other only at the end.
    """

    def __init__(
        self,
        bf16: bool,
        timeout: timedelta = timedelta(hours=24),
        rollout_ranks: int = 0,
        fused_kernels: Literal["auto", "off"] = "auto",
    ) -> None:
        self.device, self.launch = init_process_group(timeout, rollout_ranks)
        set_up_gpu(bf16)
        self.comm = TorchComm()
        self.fuses = fused_kernels == "auto" and has_kernels(self.device, self.comm)

    @property
    def is_main(self) -> bool:
        """True on the first rank of the launch, which alone writes logs and checkpoints."""
        return self.launch.rank == 0

    def loading(self) -> AbstractContextManager[Any]:
        """Context that creates and loads models straight on a GPU; on all ranks together."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def prepare_frozen(self, module: nn.Module) -> nn.Module:
        """Return ``module`` for evaluation only, on this rank's device."""
        module.requires_grad_(False)
        self.fuse(module.eval().to(self.device))
        return module

    def fuse(self, module: nn.Module) -> None:
        """Replace operations of ``module``, which is on the device, by fused kernels; on all ranks together."""
        if self.fuses:
            fuse_kernels(module, self.device, self.comm)

    def close(self) -> None:
        """Wait for all ranks.

        The process leaves their group when it exits: DeepSpeed needs the group for another trainer.
        """
        if dist.is_initialized():
            dist.barrier()
            atexit.unregister(_leave)
            atexit.register(_leave)


def _leave() -> None:
    """Leave the process group; otherwise gloo's threads may abort a process that exits."""
    if dist.is_initialized():
        dist.destroy_process_group()
