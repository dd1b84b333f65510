"""Out of memory is recognized wherever it comes from, and its report names what helps in that phase."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from openppo.config import TrainPPOConfig, TrainSFTConfig, flat_dict, from_options
from openppo.strategy.watch import faults, out_of_memory
from openppo.strategy.watch.peers import Beat
from openppo.strategy.watch.report import render

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


def chained(error: Exception) -> Exception:
    """An error that came from another, as a reward function's does."""
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
    ],
)
def test_a_lack_of_memory_is_recognized_also_as_a_cause(error: Exception) -> None:
    assert out_of_memory.is_out_of_memory(error)
    assert out_of_memory.is_out_of_memory(chained(error))


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space left"), KeyError()])
def test_other_errors_are_not(error: Exception) -> None:
    assert not out_of_memory.is_out_of_memory(error)


def test_a_real_allocation_that_fails_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory.is_out_of_memory(caught.value)


def ppo(**options: Any) -> dict[str, Any]:
    return flat_dict(from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="r.py", **options))


def flags(phase: str, **options: Any) -> str:
    return "\n".join(out_of_memory.remedies(phase, ppo(**options)))


def test_each_phase_has_remedies_of_its_own() -> None:
    assert "--max_num_seqs" in flags("generation")
    assert "--micro_train_batch_size" not in flags("generation")
    assert "--micro_train_batch_size" in flags("training")
    assert "--gradient_checkpointing" in flags("training")
    assert "--adam_offload" in flags("loading")
    assert "--micro" not in flags("loading")


def test_what_the_run_has_already_is_no_remedy() -> None:
    options = {"zero_stage": 3, "gradient_checkpointing": True, "lora_rank": 8, "micro_train_batch_size": 1}
    for name in options:
        assert f"--{name}" in flags("training")
        assert f"--{name}" not in flags("training", **{name: options[name]})


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_with_a_bound_on_tokens_that_is_what_to_lower(kind: str) -> None:
    phase = "training" if kind == "train" else "experience"
    assert f"--micro_{kind}_tokens" not in flags(phase)
    bounded = flags(phase, **{f"micro_{kind}_tokens": 4096})
    assert f"--micro_{kind}_tokens" in bounded
    assert f"--micro_{kind}_batch_size" not in bounded
    assert "--micro_rollout_batch_size" in flags("scoring", micro_rollout_tokens=4096), "as reward models have it"


def test_only_a_report_of_memory_says_what_each_model_takes() -> None:
    where = Beat(rank=0, phase="training", step=3)
    lacking, other = (faults.raised(e, where, ppo(), lambda: ["actor 3 GiB"]) for e in (MemoryError(), KeyError()))
    assert "memory:  actor 3 GiB\n" in render(lacking, [], "")
    assert "actor" not in render(other, [], "")


def test_only_flags_of_the_command_are_named() -> None:
    sft = flat_dict(from_options(TrainSFTConfig, pretrain="m", dataset="d"))
    (line,) = out_of_memory.remedies("step", sft)
    assert "--max_len" in line
    assert "--generate_max_len" not in line
    assert out_of_memory.remedies("step", {}) == []


def test_sizes_are_those_of_process_machine_and_options() -> None:
    memory, *_, options = out_of_memory.memory_lines(ppo(micro_train_batch_size=3))
    assert "GiB available of" in memory
    assert "--micro_train_batch_size 3" in options
    assert "--seed" not in options
    assert "tokens" not in options, "no bound on tokens is given"
    assert "--micro_train_tokens 512" in out_of_memory.memory_lines(ppo(micro_train_tokens=512))[-1]


NCCL = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"


def test_memory_that_nccl_lacks_is_no_broken_connection() -> None:
    error = torch.distributed.DistBackendError(NCCL)
    assert out_of_memory.is_out_of_memory(error)
    assert not faults.is_consequence(error)
    assert faults.is_consequence(torch.distributed.DistBackendError("ncclRemoteError: connection closed by peer"))


@pytest.mark.parametrize("full", [False, True])
def test_the_gpu_is_that_of_the_rank_whatever_thread_asks(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """CUDA's current device is one of each thread; asked without a number, the watch's would be GPU 0."""

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
    line = out_of_memory.memory_lines({})[1]
    assert line.startswith("GPU 3: 13.00 GiB allocated, 23.00 GiB reserved, 33.00 GiB at the peak of the phase")
    assert line.endswith("at the peak of the phase" if full else ", 3.00 GiB free of 80.00 GiB")
