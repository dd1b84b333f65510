"""A gradient that is not finite changes nothing, and too many ranks end with a message, not inside CUDA."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.comm import init_process_group
from openppo.strategy.ds_config import eval_config, merge, train_config
from openppo.strategy.trainable_model import MOMENTS, TrainableModel


class FakeDeepSpeed:
    """The calls that a step makes; ZeRO stage 2 reports this norm."""

    def __init__(self, norm: float) -> None:
        self.norm = norm
        self.module = nn.Linear(1, 1)
        self.steps = 0

    def zero_optimization_stage(self) -> int:
        return 2

    def step(self) -> None:
        self.steps += 1

    def get_global_grad_norm(self) -> float:
        return self.norm


def engine(norm: float) -> TrainableModel:
    scheduler: Any = SimpleNamespace(n=0)
    scheduler.step = lambda: setattr(scheduler, "n", scheduler.n + 1)
    deepspeed: Any = FakeDeepSpeed(norm)
    return TrainableModel(deepspeed, scheduler)


def test_training_goes_on_as_if_moments_had_never_rested_on_the_host() -> None:
    """And nothing holds on to their memory on the device meanwhile."""
    results = []
    for rests in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(5))
        adam = torch.optim.AdamW([weight], lr=0.1)
        deepspeed: Any = SimpleNamespace(basic_optimizer=adam, device=torch.device("cpu"))
        trained = TrainableModel(deepspeed, SimpleNamespace())  # type: ignore[arg-type]
        for _ in range(4):
            trained.load_moments()
            (weight**2).sum().backward()
            adam.step()
            adam.zero_grad()
            if rests:
                held = [weakref.ref(adam.state[weight][name]) for name in MOMENTS]
                trained.offload_moments()
                assert [moment() for moment in held] == [None, None]
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_nothing_in_deepspeed_holds_on_to_moments_that_rest_on_the_host(stage: int, bf16: bool) -> None:
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=stage, bf16=bf16))
    trained = strategy.prepare(nn.Linear(64, 64), AdamConfig(), learning_rate=1e-3, total_steps=10)
    batch = torch.randn(4, 64, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(2):
        trained.load_moments()
        trained.backward(trained(batch).float().square().mean(), last=True)
        trained.step()
        states = trained._adam_states()
        held = [StorageWeakRef(state[name].untyped_storage()) for state in states for name in MOMENTS]
        assert held
        trained.offload_moments()
        gc.collect()
        assert all(storage.expired() for storage in held)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_of_a_single_rank_are_added_in_float32(stage: int, offloaded: bool) -> None:
    """1 and eight times 1/1024: in bfloat16 the sum would stay 1. On two ranks: tests/distributed/test_engine.py."""
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=stage, bf16=True, adam_offload=offloaded and stage > 0))
    module = nn.Linear(1, 2, bias=False).bfloat16()
    trained = strategy.prepare(module, AdamConfig(), learning_rate=1e-3, total_steps=10)
    gradients = [1.0] + [2.0**-10] * 8
    for i, gradient in enumerate(gradients):
        given = torch.ones(1, 1, dtype=torch.bfloat16)
        trained.backward(trained(given).float().sum() * gradient, last=i == len(gradients) - 1)
    assert trained.step() == pytest.approx(2**0.5 * (1 + 8 * 2.0**-10), rel=1e-6)


def test_no_forward_waits_for_deepspeeds_throughput_timer() -> None:
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=3))
    trained = strategy.prepare(nn.Linear(2, 2), AdamConfig(), learning_rate=1e-3, total_steps=10)
    frozen: Any = strategy.prepare_frozen(nn.Linear(2, 2))
    assert [engine.tput_timer.config.enabled for engine in (trained.deepspeed, frozen)] == [False, False]


@pytest.mark.parametrize(("gpu", "probed"), [(False, "True"), (True, "False")])
def test_operators_are_probed_on_cpus_only(gpu: bool, probed: str) -> None:
    program = f"""
import torch
from deepspeed import ops
torch.cuda.is_available = lambda: {gpu}
import openppo.strategy.deepspeed
print("__compatible_ops__" in vars(ops))
"""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{probed}\n", done.stderr


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1 * math.inf])
def test_a_gradient_that_is_not_finite_does_not_advance_the_schedule(norm: float) -> None:
    diverged = engine(norm)
    assert not math.isfinite(diverged.step())
    assert diverged.scheduler.n == 0
    fine = engine(1.0)
    fine.step()
    assert fine.scheduler.n == 1


def test_a_finite_gradient_norm_is_returned() -> None:
    assert engine(0.25).step() == 0.25


def test_more_ranks_than_gpus_is_an_error_that_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--nproc_per_node .*1 GPUs"):
        init_process_group(timedelta(seconds=1))


def test_a_single_process_makes_no_rank_of_the_programs_that_it_starts() -> None:
    program = """
import os
from datetime import timedelta
from openppo.strategy.comm import TorchComm, init_process_group
before = dict(os.environ)
init_process_group(timedelta(seconds=60))
print(TorchComm().all_gather_object("here"), sorted(os.environ.keys() - before.keys()))
"""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=300)
    assert done.stdout == "['here'] ['LOCAL_RANK']\n", done.stderr


def start_joining(rank: str, **environment: str) -> subprocess.Popen[str]:
    """A process that joins a group of three on this machine, for up to three seconds."""
    program = "from openppo.strategy.comm import *; init_process_group(timedelta(seconds=3))"
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | group | environment, stderr=subprocess.PIPE, text=True
    )


def test_a_rank_that_does_not_come_is_named_by_those_that_wait() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one
    torchrun = {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    joining = [start_joining(rank, **torchrun) for rank in ("0", "2")]
    for process in joining:
        assert "ValueError: rank 1 of 3 did not start within 3 s" in process.communicate(timeout=100)[1]


def test_a_first_host_that_is_not_there_is_named_by_its_address() -> None:
    message = start_joining("1", MASTER_PORT="1").communicate(timeout=100)[1]
    assert "ValueError: rank 0 was not reached at 127.0.0.1:1 within 3 s" in message


def test_overrides_reach_into_nested_options_and_change_neither_side() -> None:
    options = train_config(DeepSpeedConfig(bf16=True), zero_stage=3, n_trained=11, n_ranks=2)
    before = options["zero_optimization"]["stage"]
    merged = merge(options, {"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    assert merged["zero_optimization"]["stage"] == before == 3
    assert merged["zero_optimization"]["stage3_param_persistence_threshold"] == 0
    assert "stage3_param_persistence_threshold" not in options["zero_optimization"]


def test_flags_of_communication_reach_deepspeed() -> None:
    flags = train_config(DeepSpeedConfig(zero_stage=3, zpg=4, overlap_comm=True), 3, 7, n_ranks=8)["zero_optimization"]
    assert (flags["zero_hpz_partition_size"], flags["overlap_comm"]) == (4, True)
    assert "overlap_comm" not in train_config(DeepSpeedConfig(), 3, 7, n_ranks=8)["zero_optimization"]


def test_deepspeed_is_told_of_one_micro_batch_per_step_so_that_it_scales_nothing() -> None:
    for stage in (0, 1, 2, 3):
        options = train_config(DeepSpeedConfig(max_norm=0.5), stage, n_trained=7, n_ranks=1)
        assert options["gradient_accumulation_steps"] == 1
        assert options["gradient_clipping"] == 0.5
    assert "offload_optimizer" not in options["zero_optimization"]
    assert eval_config(bf16=False)["zero_optimization"] == {"stage": 3}
