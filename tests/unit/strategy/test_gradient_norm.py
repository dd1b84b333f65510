"""Gradient norms in a few kernels: equal to a plain loop in float64, and only where DeepSpeed is as expected."""

import logging
import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.gradient_norm import (
    REPLACED,
    _norm_over_ranks,
    join_gradient_norms,
    missing_names,
    norms,
)

SETUPS: dict[type, dict[str, Any]] = {
    DeepSpeedZeroOptimizer: {"zero_stage": 2},
    BF16_Optimizer: {"zero_stage": 1, "bf16": True},
}


def prepared(**options: Any) -> Any:
    """A trained model with three weights under these options."""
    strategy, bf16 = DeepspeedStrategy(DeepSpeedConfig(**options)), options.get("bf16", False)
    module = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16 if bf16 else torch.float32)
    return strategy.prepare(module, AdamConfig(), learning_rate=1e-3, total_steps=4)


def replaced(optimizer: Any) -> set[str]:
    """Methods of the class that this optimizer has of its own."""
    return {name for names in REPLACED.values() for name in names} & vars(optimizer).keys()


def padding(n: int) -> Tensor:
    """Zeros that DeepSpeed puts behind the last gradient."""
    zeros: Any = torch.zeros(n)
    zeros._zero_padding = True
    return zeros


@pytest.mark.parametrize("kind", list(REPLACED), ids=lambda kind: kind.__name__)
def test_this_deepspeed_has_every_name_that_is_used(kind):
    optimizer = prepared(**SETUPS[kind]).deepspeed.optimizer
    assert type(optimizer) is kind
    assert missing_names(optimizer) == []


def test_the_norm_is_that_of_a_plain_loop_in_float64():
    prepared(zero_stage=2)  # for the process group
    gradients = [
        torch.randn(7, 3),
        torch.randn(1, 1).bfloat16().float(),
        torch.full((2,), 1e-30),
        torch.empty(0),
    ]
    total = 0.0
    for gradient in gradients:
        for number in gradient.flatten().tolist():
            total += number**2

    optimizer = SimpleNamespace(device="cpu", dp_process_group=None)
    norm = _norm_over_ranks(optimizer, [*gradients, padding(5)], params=())
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(total), rel=1e-7)
    assert _norm_over_ranks(optimizer, [padding(5)], params=()).item() == 0.0


def test_squares_beyond_float32_have_a_norm_in_float64():
    assert norms([torch.tensor([3e38, 3e38])]).item() == pytest.approx(math.sqrt(2) * 3e38)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_the_minus_1_of_deepspeed(number):
    prepared(zero_stage=2)
    optimizer = SimpleNamespace(device="cpu", dp_process_group=None)
    assert (
        _norm_over_ranks(optimizer, [torch.ones(3), torch.tensor([1.0, number])], params=()).item()
        == -1.0
    )


@pytest.mark.parametrize("kind", list(REPLACED), ids=lambda kind: kind.__name__)
def test_gpus_replace_the_methods_of_each_optimizer(kind):
    optimizer = prepared(**SETUPS[kind]).deepspeed.optimizer
    assert join_gradient_norms(optimizer, on_gpu=True)
    assert replaced(optimizer) == set(REPLACED[kind])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero_stage": 2, "adam_offload": True}, id="gradients on the host"),
        pytest.param({"zero_stage": 1, "bf16": True}, id="another rounding on CPUs"),
        pytest.param({"zero_stage": 0}, id="ZeRO-0"),
        pytest.param({"zero_stage": 3}, id="ZeRO-3"),
    ],
)
def test_elsewhere_deepspeeds_norm_stays_in_silence(options, caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        assert replaced(prepared(**options).deepspeed.optimizer) == set()
    assert "gradient norms" not in caplog.text


def test_an_unknown_optimizer_keeps_its_norm_with_a_line(caplog):
    with caplog.at_level(logging.INFO, "openppo"):
        assert not join_gradient_norms(SimpleNamespace(), on_gpu=True)
    assert (
        "made a SimpleNamespace, which is not known, so each optimizer step takes DeepSpeed's slower"
        in caplog.text
    )


def test_a_name_that_deepspeed_lacks_keeps_its_norm_with_a_line(caplog):
    optimizer = prepared(zero_stage=2).deepspeed.optimizer
    del optimizer.compute_grad_norm, optimizer.check_overflow, optimizer.get_grad_norm_direct
    with caplog.at_level(logging.INFO, "openppo"):
        assert not join_gradient_norms(optimizer, on_gpu=True)
    assert replaced(optimizer) == set()
    assert "gradient norms: DeepSpeedZeroOptimizer of DeepSpeed" in caplog.text
    assert (
        "has no compute_grad_norm, so each optimizer step takes DeepSpeed's slower way"
        in caplog.text
    )


def test_a_step_takes_one_norm_and_reads_gradients_for_nothing_else():
    model = prepared(zero_stage=2, bf16=True)
    model.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).float().sum(), last=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model.step()
    operators = Counter(event.name for event in profiler.events())
    assert operators["aten::_foreach_norm"] == 1
    assert operators["aten::amax"] + operators["aten::amin"] == 0


@pytest.mark.parametrize(
    "options", [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 2, "bf16": True}]
)
def test_a_skipped_step_reports_infinity_and_the_next_is_taken(options):
    model = prepared(**options)
    before = [parameter.clone() for parameter in model.module.parameters()]
    inputs = torch.ones(1, 3, dtype=before[0].dtype)
    for scale, norm in ((math.nan, math.inf), (2.0, 2 * math.sqrt(3))):
        model.backward(model(inputs).float().sum() * scale, last=True)
        assert model.step() == pytest.approx(norm)
        changed = not torch.equal(before[0], model.module.weight)
        assert changed == math.isfinite(norm)
