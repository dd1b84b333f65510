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


class Weights(nn.Module):
    """A vector of 64 ones, whose gradient is whatever it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum()


def strategy_of(zero_stage: Any) -> DeepspeedStrategy:
    config = DeepSpeedConfig(zero_stage=zero_stage, bf16=True, max_norm=0.0)
    return DeepspeedStrategy(config, timedelta(seconds=60), PARTITION_EVERYTHING)


def descend(zero_stage: int) -> list[float]:
    """40 steps along a constant gradient in bfloat16; Adam then moves by the learning rate exactly."""
    strategy = strategy_of(zero_stage)
    adam = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
    engine, weights = strategy.prepare(Weights(), adam, 1e-4, total_steps=40), []
    for _ in range(40):
        engine.backward(engine(1.0), last=True)
        engine.step()
        with engine.gathered():
            weights.append(engine.module.weight.float().mean().item())
    return weights


def turn_around(zero_stage: int) -> list[float]:
    """Five steps down and, after a reset, three up again: old moments would go on downwards."""
    strategy = strategy_of(zero_stage)
    adam = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
    engine, weights = strategy.prepare(Weights(), adam, 1 / 64, total_steps=8), []
    for step in range(8):
        if step == 5:
            engine.reset_adam()
        engine.backward(engine(1.0 if step < 5 else -1.0), last=True)
        engine.step()
        with engine.gathered():
            weights.append(engine.module.weight.float().mean().item())
    return weights


def norm_of(zero_stage: int, gradients: list[float]) -> float:
    """The norm of accumulated gradients."""
    engine = strategy_of(zero_stage).prepare(Weights(), AdamConfig(), 1e-4, total_steps=4)
    for i, gradient in enumerate(gradients):
        engine.backward(engine(gradient), last=i == len(gradients) - 1)
    return engine.step()


def main() -> None:
    """All experiments."""
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        results[f"tiny updates {stage}"] = descend(
            stage
        )  # from 1.0, whose next number below is 0.996 in bfloat16
        results[f"turn {stage}"] = turn_around(stage)
        # in bfloat16 each of these sums would stay 1
        results[f"small gradients {stage}"] = norm_of(stage, [1.0] + [2.0**-10] * 8)
        results[f"small rank {stage}"] = norm_of(
            stage, [2.0 ** (-10 * torch.distributed.get_rank())] * 2
        )
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
def test_updates_below_the_resolution_of_bfloat16_add_up(results, stage):
    weights = results[f"tiny updates {stage}"]
    exact = torch.tensor([1 - 1e-4 * (step + 1) for step in range(40)])
    assert weights == exact.bfloat16().float().tolist()
    assert weights[0] == 1.0 > weights[-1]


@STAGES
def test_after_a_reset_adam_steps_by_the_learning_rate_against_its_past(results, stage):
    assert [64 * weight for weight in results[f"turn {stage}"]] == [63, 62, 61, 60, 59, 60, 61, 62]


@STAGES
def test_gradients_of_micro_batches_and_ranks_are_added_in_float32(results, stage):
    assert results[f"small gradients {stage}"] == pytest.approx(
        math.sqrt(64) * (1 + 8 / 1024), rel=1e-5
    )
    assert results[f"small rank {stage}"] == pytest.approx(math.sqrt(64) * (1 + 1 / 1024), rel=1e-5)


if __name__ == "__main__":
    main()
