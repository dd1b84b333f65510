"""Out of memory is recognized whatever raises it, and reported with sizes and remedies."""

import errno
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.strategy import fault_report
from openppo.strategy.heartbeats import Heartbeat

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."
NCCL = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
WHERE = Heartbeat(rank=0, phase="training", step=3, idle=0)


def chained(error: Exception) -> Exception:
    """An error with a cause, as a reward function's."""
    outer = RuntimeError("scoring failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(CPU),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.distributed.DistBackendError(NCCL),
    ],
)
def test_a_lack_of_memory_is_recognized_also_as_a_cause(error: Exception) -> None:
    for raised in (error, chained(error)):
        assert fault_report.is_out_of_memory(raised)
        assert not fault_report.is_broken_connection(raised)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space left"), KeyError()])
def test_other_errors_are_not_a_lack_of_memory(error: Exception) -> None:
    assert not fault_report.is_out_of_memory(error)


def test_a_closed_connection_is_recognized() -> None:
    closed = torch.distributed.DistBackendError("ncclRemoteError: connection closed by peer")
    assert fault_report.is_broken_connection(closed)


def test_a_real_allocation_that_fails_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert fault_report.is_out_of_memory(caught.value)


def ppo(**options: Any) -> dict[str, Any]:
    return flat_dict(from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="r.py", **options))


def test_only_a_report_of_memory_has_sizes_models_and_remedies() -> None:
    lacking, other = (
        fault_report.raised(error, WHERE, ppo(micro_train_batch_size=3), lambda: ["actor 3 GiB"]).render([], "")
        for error in (MemoryError(), KeyError())
    )
    assert "GiB available of" in lacking
    assert "--micro_train_batch_size 3" in lacking
    assert "memory:  actor 3 GiB\n" in lacking
    assert "try:     reduce memory in training with --micro_train_batch_size, --gradient_checkpointing" in lacking
    assert "memory" not in other
    assert "try:" not in other


def test_credentials_are_masked() -> None:
    report = fault_report.raised(RuntimeError("POST https://me:secret@host/?key=k1"), WHERE, {}, list).render([], "")
    assert "secret" not in report
    assert "k1" not in report


@pytest.mark.parametrize("full", [False, True])
def test_gpu_memory_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """The current device of CUDA belongs to a thread; that of the watchdog's is GPU 0."""

    def info(gpu: int) -> tuple[int, int]:
        if full:
            raise RuntimeError("CUDA error: out of memory")
        return gpu << 30, 80 << 30

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    for name, gib in (("memory_allocated", 10), ("memory_reserved", 20), ("max_memory_allocated", 30)):
        monkeypatch.setattr(torch.cuda, name, lambda gpu, gib=gib: (gib + gpu) << 30)
    line = fault_report.memory_lines({})[1]
    assert line.startswith("GPU 3: 13.00 GiB allocated, 23.00 GiB reserved, 33.00 GiB at the peak of the phase")
    assert line.endswith("at the peak of the phase" if full else ", 3.00 GiB free of 80.00 GiB")
