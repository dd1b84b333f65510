"""One trained model on one rank: its steps, schedule, averages, and the configuration that DeepSpeed gets."""

import gc
import logging
import math
from collections.abc import Callable
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.deepspeed import learning_rate_schedule
from openppo.strategy.ds_config import eval_config, merge, train_config
from openppo.strategy.ema import ParameterAverage, average_device
from openppo.strategy.trainable_model import adapters_merged


def test_options_made_in_python_are_checked():
    with pytest.raises(ValueError, match="overlap_comm must be auto, on or off, got False"):
        DeepspeedStrategy(DeepSpeedConfig(overlap_comm=False))  # type: ignore[arg-type]


def trained_for(steps: int, stage: int, bf16: bool, offloads: bool) -> list[torch.Tensor]:
    """Weights after so many steps; with ``offloads``, moments were on the host between them."""
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=stage, bf16=bf16))
    torch.manual_seed(0)
    module = nn.Linear(8, 8, dtype=torch.bfloat16 if bf16 else torch.float32)
    trained = strategy.prepare(module, AdamConfig(), learning_rate=1e-2, total_steps=10)
    for _ in range(steps):
        trained.load_adam_moments()
        batch = torch.randn(4, 8, dtype=module.weight.dtype)
        trained.backward(trained(batch).float().square().mean(), last=True)
        trained.step()
        if offloads:
            held = [
                StorageWeakRef(state[name].untyped_storage())
                for _, state, name in trained._adam_moments()
            ]
            assert held
            trained.offload_adam_moments()
            gc.collect()
            assert all(storage.expired() for storage in held), "their memory on the device is free"
    with trained.gathered():
        return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offloaded_moments_free_memory_and_change_no_bit(stage, bf16):
    plain, offloaded = (trained_for(4, stage, bf16, offloads) for offloads in (False, True))
    assert all(map(torch.equal, plain, offloaded))


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_of_a_single_rank_are_added_in_float32(stage, offloaded):
    """1 and eight times 1/1024: in bfloat16 the sum would stay 1. On two ranks: tests/distributed/test_engine.py."""
    strategy = DeepspeedStrategy(
        DeepSpeedConfig(zero_stage=stage, bf16=True, adam_offload=offloaded and stage > 0)
    )
    module = nn.Linear(1, 2, bias=False).bfloat16()
    trained = strategy.prepare(module, AdamConfig(), learning_rate=1e-3, total_steps=10)
    gradients = [1.0] + [2.0**-10] * 8
    for i, gradient in enumerate(gradients):
        given = torch.ones(1, 1, dtype=torch.bfloat16)
        trained.backward(trained(given).float().sum() * gradient, last=i == len(gradients) - 1)
    assert trained.step() == pytest.approx(2**0.5 * (1 + 8 * 2.0**-10), rel=1e-6)


def test_a_program_may_train_again_after_it_has_closed():
    for _ in range(2):
        strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=2))
        strategy.prepare(nn.Linear(2, 2), AdamConfig(), learning_rate=1e-3, total_steps=10)
        strategy.close()


def test_frozen_models_need_no_gradient_and_no_forward_waits_for_deepspeeds_timer():
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=3))
    trained = strategy.prepare(nn.Linear(2, 2), AdamConfig(), learning_rate=1e-3, total_steps=10)
    frozen: Any = strategy.prepare_frozen(nn.Linear(2, 2))
    assert [engine.tput_timer.config.enabled for engine in (trained.deepspeed, frozen)] == [
        False,
        False,
    ]
    assert not any(parameter.requires_grad for parameter in frozen.module.parameters())


def test_flags_and_overrides_reach_deepspeed_which_scales_nothing():
    options: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    merged = merge(options, {"zero_optimization": {"cpu_offload": 0}})
    assert merged == {
        "zero_optimization": {"stage": 3, "cpu_offload": 0},
        "bf16": {"enabled": True},
    }
    assert options["zero_optimization"] == {"stage": 3}
    zero = train_config(DeepSpeedConfig(zero_stage=3, zpg=4, overlap_comm="on"), 3, 7, n_ranks=8)[
        "zero_optimization"
    ]
    assert (zero["zero_hpz_partition_size"], zero["overlap_comm"]) == (4, True)
    with pytest.raises(ValueError, match="zpg 2 does not divide the 1 ranks"):
        DeepspeedStrategy(DeepSpeedConfig(zero_stage=3, zpg=2))
    for stage in (0, 1, 2, 3):
        options = train_config(DeepSpeedConfig(max_norm=0.5), stage, n_trained=7, n_ranks=1)
        assert (options["gradient_accumulation_steps"], options["gradient_clipping"]) == (1, 0.5)
        assert not {"offload_optimizer", "overlap_comm"} & options["zero_optimization"].keys()
    assert eval_config(bf16=False)["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("flag", "n_ranks", "on_gpu", "expected"),
    [
        ("auto", 8, True, True),
        ("auto", 1, True, None),
        ("auto", 8, False, None),
        ("on", 1, False, True),
        ("off", 8, True, False),
    ],
)
def test_several_gpus_reduce_gradients_during_the_backward_pass(flag, n_ranks, on_gpu, expected):
    options = train_config(DeepSpeedConfig(overlap_comm=flag), 2, 7, n_ranks, on_gpu)
    assert options["zero_optimization"].get("overlap_comm") is expected


PEAK, TOTAL, WARM_UP = 0.5, 20, 4
FALLS: dict[str, Callable[[float], float]] = {  # of the share of steps after the warm-up
    "cosine_with_min_lr": lambda x: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * x)),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda x: 1 - x,
    "constant_with_warmup": lambda x: 1.0,
}


def rates(name: Any, ratio: float, total: int = TOTAL) -> list[float]:
    """The rates of all steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    made: Any = learning_rate_schedule(
        optimizer, AdamConfig(lr_scheduler=name, lr_warmup_ratio=ratio), total
    )
    found = []
    for _ in range(total):
        assert made.get_last_lr()[0] == optimizer.param_groups[0]["lr"]
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize("name", list(FALLS))
def test_rates_rise_in_equal_steps_above_zero_and_then_fall(name):
    up = [PEAK * (step + 1) / WARM_UP for step in range(WARM_UP)]
    down = [
        PEAK * FALLS[name]((step - WARM_UP) / (TOTAL - WARM_UP)) for step in range(WARM_UP, TOTAL)
    ]
    assert rates(name, 0.2) == pytest.approx(up + down)


def test_a_share_of_few_steps_is_rounded_up():
    assert rates("constant_with_warmup", 0.03, 48)[:3] == [PEAK / 2, PEAK, PEAK]  # 1.44 steps


def test_the_first_step_changes_weights_whatever_the_options():
    assert set(get_args(get_type_hints(AdamConfig)["lr_scheduler"])) == {*FALLS, "constant"}
    assert rates("constant", 0.5) == [PEAK] * TOTAL
    for name in FALLS:
        assert all(rates(name, *case)[0] > 0 for case in ((0.0, 5), (0.03, 34), (0.5, 2), (1.0, 3)))


def test_only_trained_parameters_are_averaged_and_come_back_after_an_error():
    module: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(3, 1).requires_grad_(False))
    engine = DeepspeedStrategy(DeepSpeedConfig(zero_stage=0)).prepare(
        module, AdamConfig(), 1e-3, total_steps=1
    )
    ema, weight = ParameterAverage(engine, beta=0.75), module[0].weight
    assert ema.fragments().keys() == {"0.weight", "0.bias"}
    nn.init.constant_(weight, 8.0)
    ema.fragments()["0.weight"].values.fill_(4.0)
    ema.update()
    with pytest.raises(OSError), ema.swapped_in():
        assert weight.item() == 0.75 * 4 + 0.25 * 8
        raise OSError("disk full")
    assert weight.item() == 8.0


def adapted(dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers with adapters that change its outputs."""
    layers = nn.Sequential(nn.Linear(6, 5, dtype=dtype), nn.Linear(5, 4, dtype=dtype))
    model: Any = get_peft_model(
        layers, LoraConfig(target_modules=["0", "1"], r=2), autocast_adapter_dtype=False
    )  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_return_after_an_error(dtype):
    model, inputs = adapted(dtype), torch.randn(3, 6, dtype=dtype)
    base, before = [layer.base_layer.weight for layer in model.base_model.model], model(inputs)
    kept = [(weight.clone(), weight.data_ptr()) for weight in base]
    expected = [
        layer.base_layer.weight.double()
        + 4 * layer.lora_B.default.weight.double() @ layer.lora_A.default.weight.double()
        for layer in model.base_model.model
    ]
    atol = 1e-6 if dtype is torch.float32 else 2**-6
    with pytest.raises(OSError), adapters_merged(model):
        for weight, merged in zip(base, expected, strict=True):
            torch.testing.assert_close(weight.double(), merged, rtol=0, atol=atol)
        raise OSError("the rollout failed")
    assert all(
        torch.equal(weight, was) and weight.data_ptr() == place
        for weight, (was, place) in zip(base, kept, strict=True)
    )
    assert torch.equal(model(inputs), before), "adapters take part again"


def test_merging_that_runs_out_of_memory_changes_nothing(monkeypatch):
    model, inputs = adapted(), torch.randn(3, 6)
    before, second = model(inputs), model.base_model.model[1]
    monkeypatch.setattr(
        second, "get_delta_weight", Mock(side_effect=torch.OutOfMemoryError("full"))
    )
    with pytest.raises(torch.OutOfMemoryError), adapters_merged(model):
        raise AssertionError("it was not merged")
    assert torch.equal(model(inputs), before)


@pytest.mark.parametrize(("free", "merges"), [(4, True), (3.9, False)])
def test_adapters_are_merged_where_two_copies_fit(free, merges, monkeypatch, caplog):
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=2))
    model = strategy.prepare(adapted(), AdamConfig(), 1e-3, total_steps=1)
    assert strategy.fits_merged(model)
    monkeypatch.setattr(strategy, "device", torch.device("cuda"))
    copies, moments = 4 * (6 * 5 + 5 * 4), 2 * 4 * 2 * (6 + 5 + 5 + 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free / 2 * copies + moments, 0))
    with caplog.at_level(logging.WARNING, "openppo"):
        assert strategy.fits_merged(model) == merges
    assert ("sampling adds adapters" in caplog.text) != merges


def test_adapters_are_not_merged_into_4_bits(caplog):
    strategy, model = DeepspeedStrategy(DeepSpeedConfig(zero_stage=2)), adapted()
    packed = nn.Parameter(
        torch.zeros(15, 1, dtype=torch.uint8), requires_grad=False
    )  # as bitsandbytes has them
    model.base_model.model[0].base_layer.weight = packed
    with caplog.at_level(logging.INFO, "openppo"):
        assert not strategy.fits_merged(strategy.prepare(model, AdamConfig(), 1e-3, total_steps=1))
    assert caplog.text.count("not merged") == 1


def test_the_average_lies_on_a_device_that_has_room(caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        places = [average_device(2**30, room, "cuda:1").type for room in (2**30, 2**30 - 1, -1)]
    assert places == ["cuda", "cpu", "cpu"]
    assert [f"the average lies on the {place}" in caplog.text for place in ("device", "host")] == [
        True,
        True,
    ]
    assert average_device(1, 0, "cpu") == average_device(1, 1, "cpu") == torch.device("cpu")


def test_averages_are_equal_wherever_they_lie():
    module: Any = nn.Linear(3, 2)
    engine = DeepspeedStrategy(DeepSpeedConfig(zero_stage=0)).prepare(
        module, AdamConfig(), 1e-3, total_steps=1
    )
    on_host = ParameterAverage(engine, 0.7)
    on_device = ParameterAverage(engine, 0.7, room=32)
    for seed in range(3):
        torch.manual_seed(seed)
        nn.init.normal_(module.weight)
        on_host.update(), on_device.update()
    for name, fragment in on_host.fragments().items():
        assert fragment.values.equal(on_device.fragments()[name].values)


def test_offloading_adam_needs_a_compiler(monkeypatch):
    strategy, module = DeepspeedStrategy(DeepSpeedConfig(adam_offload=True)), nn.Linear(1, 1)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"--adam_offload needs a C\+\+ compiler.*omit the flag"):
        strategy.prepare(module, AdamConfig(), 1e-3, total_steps=1)
