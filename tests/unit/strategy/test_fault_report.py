"""Out of memory is recognized whatever raises it, and reported with sizes and remedies."""

import errno
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.strategy import fault_report
from openppo.strategy.heartbeats import Heartbeat, HeartbeatStore

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."
NCCL = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
WHERE = Heartbeat(rank=0, phase="training", step=3, idle=0)


@pytest.mark.parametrize(
    ("error", "memory", "connection"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, False),
        (RuntimeError(CPU), True, False),
        (MemoryError(), True, False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True, False),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
            False,
        ),
        (torch.distributed.DistBackendError(NCCL), True, False),
        (
            torch.distributed.DistBackendError("ncclRemoteError: connection closed by peer"),
            False,
            True,
        ),
        (RuntimeError("shape mismatch"), False, False),
        (OSError(errno.ENOSPC, "No space left"), False, False),
    ],
)
def test_lack_of_memory_and_closed_connections_are_recognized(error, memory, connection):
    outer = RuntimeError("scoring failed")  # as of a reward function
    outer.__cause__ = error
    for raised in (error, outer):
        assert fault_report.is_out_of_memory(raised) is memory
        assert fault_report.is_broken_connection(raised) is connection


def test_only_a_report_of_memory_has_sizes_models_and_remedies():
    given = {"pretrain": "m", "prompt_data": "d", "reward_fn": "r.py", "micro_train_batch_size": 3}
    options = flat_dict(from_options(TrainPPOConfig, **given))
    lacking, other = (
        fault_report.raised(
            error, WHERE, options, lambda phase: [("memory", f"actor 3 GiB in {phase}")]
        ).render([], "")
        for error in (MemoryError(), KeyError())
    )
    assert "GiB available of" in lacking
    assert "--micro_train_batch_size 3" in lacking
    assert "memory:  actor 3 GiB in training\n" in lacking
    assert (
        "try:     reduce memory in training with --micro_train_batch_size, --gradient_checkpointing"
        in lacking
    )
    assert "memory" not in other
    assert "try:" not in other


def test_memory_that_others_hold_is_not_saved_by_options():
    options = flat_dict(
        from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="r.py")
    )
    rows = [("memory", "128.0 GiB are held by something else"), ("try", "end what else holds it")]
    report = fault_report.raised(MemoryError(), WHERE, options, lambda phase: rows).render([], "")
    assert "memory:  128.0 GiB are held by something else\n" in report
    assert "try:     end what else holds it\n" in report
    assert "reduce memory" not in report


def test_credentials_are_masked():
    report = fault_report.raised(
        RuntimeError("POST https://me:secret@host/?key=k1"), WHERE, {}, None
    ).render([], "")
    assert "secret" not in report
    assert "k1" not in report


def test_a_rank_waits_for_those_that_started_fewer_collectives():
    ahead, behind = (replace(WHERE, collectives=n) for n in (7, 6))
    assert ahead.waits_for(behind)
    assert not ahead.waits_for(ahead)
    assert not behind.waits_for(ahead)
    assert not ahead.waits_for(replace(behind, status=0)), "it has left its groups"
    assert not ahead.waits_for(replace(behind, samples=True)), (
        "the sides have collectives of their own"
    )
    assert replace(ahead, samples=True).waits_for(replace(behind, samples=True))


def test_a_rank_that_trains_waits_for_one_that_still_loads():
    loading = replace(WHERE, phase="loading", samples=True)
    assert WHERE.waits_for(loading)
    assert not loading.waits_for(replace(loading, rank=1))


def test_a_transfer_of_weights_waits_for_samplers_that_sample_and_for_trainers():
    trains, samples = (replace(WHERE, phase="sync", samples=samples) for samples in (False, True))
    late = replace(samples, phase="generation")
    assert trains.waits_for(late)
    assert not late.waits_for(trains)
    assert samples.waits_for(trains)
    assert not trains.waits_for(samples)
    assert not trains.waits_for(replace(late, step=trains.step + 1)), "it has the weights"
    assert not samples.waits_for(replace(trains, phase="training")), "they have sent them"


def test_a_process_is_missed_on_its_own_machine_alone():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    store = HeartbeatStore(60)
    ended = replace(WHERE, pid=process.pid)
    assert store.has_ended(ended)
    assert not store.has_ended(WHERE)
    assert not store.has_ended(replace(ended, host="another"))
    assert not store.has_ended(replace(ended, launcher=8)), "of another container"
