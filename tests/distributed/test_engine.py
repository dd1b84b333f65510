"""What DeepSpeed does with our configuration, on two real ranks and for each ZeRO stage, against plain formulas.

Launched by torchrun with a folder, this file puts small modules through ``DeepspeedStrategy``, and writes what came
out, under the name of each experiment and ZeRO stage, to ``engine.json``.
"""

import json
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from tests.distributed.run_cases import PARTITION_EVERYTHING, leave

CONSTANT = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)


class Weights(nn.Module):
    """A vector of 64 ones, whose gradient is whatever it is multiplied with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum()


def strategy_of(zero_stage: Any, bf16: bool = False) -> DeepspeedStrategy:
    config = DeepSpeedConfig(zero_stage=zero_stage, bf16=bf16, max_norm=0.0)
    return DeepspeedStrategy(config, timedelta(seconds=60), PARTITION_EVERYTHING)


def ascend(strategy: DeepspeedStrategy, adam: AdamConfig, rate: float, dtype: torch.dtype) -> dict[str, list[float]]:
    """40 steps along a constant gradient; Adam then moves by the learning rate exactly."""
    engine = strategy.prepare(Weights(dtype), adam, rate, total_steps=40)
    rates, weights = [], [1.0]
    for _ in range(40):
        rates.append(engine.learning_rate)
        engine.backward(engine(1.0), last=True)
        engine.step()
        with strategy.gathered(engine):
            weights.append(engine.module.weight.float().mean().item())
    return {"rates": rates, "weights": weights}


def norm_in_bf16(zero_stage: int, gradients: list[float]) -> float:
    """The norm of accumulated gradients."""
    strategy = strategy_of(zero_stage, bf16=True)
    engine = strategy.prepare(Weights(torch.bfloat16), AdamConfig(), 1e-4, total_steps=4)
    for i, gradient in enumerate(gradients):
        engine.backward(engine(gradient), last=i == len(gradients) - 1)
    return engine.step()


def main() -> None:
    """All experiments."""
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        results[f"schedule {stage}"] = ascend(strategy_of(stage), AdamConfig(lr_warmup_ratio=0.1), 0.01, torch.float32)
        # from 1.0, whose next number below is 0.996 in bfloat16
        results[f"tiny updates {stage}"] = ascend(strategy_of(stage, bf16=True), CONSTANT, 1e-4, torch.bfloat16)
        # in bfloat16 each of these sums would stay 1
        results[f"small gradients {stage}"] = norm_in_bf16(stage, [1.0] + [2.0**-10] * 8)
        results[f"small rank {stage}"] = norm_in_bf16(stage, [2.0 ** (-10 * torch.distributed.get_rank())] * 2)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "engine.json").write_text(json.dumps(results))
    leave()


STAGES = pytest.mark.parametrize("stage", (0, 1, 2, 3))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Any]:
    """What each experiment of the script gave."""
    folder = tmp_path_factory.mktemp("engine")
    launch(2, __file__, folder)
    return json.loads((folder / "engine.json").read_text())


@STAGES
def test_the_learning_rate_rises_for_the_warm_up_and_falls_along_a_cosine_to_a_tenth(
    results: dict[str, Any], stage: int
) -> None:
    peak, total, warm_up = 0.01, 40, 4
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * t / (total - warm_up))) for t in range(total - warm_up)]
    formula = [peak * factor for factor in (0.25, 0.5, 0.75, 1.0, *cosine)]
    result = results[f"schedule {stage}"]
    assert result["rates"] == pytest.approx(formula)
    assert formula[-1] == pytest.approx(0.1 * peak, rel=0.02)
    moved = [before - after for before, after in zip(result["weights"][:-1], result["weights"][1:], strict=True)]
    assert moved == pytest.approx(formula, rel=1e-3, abs=1e-6)  # and the optimizer really uses it


@STAGES
def test_updates_below_the_resolution_of_bfloat16_add_up(results: dict[str, Any], stage: int) -> None:
    weights = results[f"tiny updates {stage}"]["weights"][1:]
    exact = torch.tensor([1 - 1e-4 * (step + 1) for step in range(40)])
    assert weights == exact.bfloat16().float().tolist()
    assert weights[0] == 1.0 > weights[-1]


@STAGES
def test_gradients_of_micro_batches_and_ranks_are_added_in_float32(results: dict[str, Any], stage: int) -> None:
    assert results[f"small gradients {stage}"] == pytest.approx(math.sqrt(64) * (1 + 8 / 1024), rel=1e-5)
    assert results[f"small rank {stage}"] == pytest.approx(math.sqrt(64) * (1 + 1 / 1024), rel=1e-5)


if __name__ == "__main__":
    main()
