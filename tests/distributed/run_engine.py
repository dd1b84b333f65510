"""Launched by torchrun: ``run_engine.py OUT`` puts small modules through ``DeepspeedStrategy`` and the replay buffer.

Writes what came out, under the name of each experiment and ZeRO stage, to ``OUT/engine.json``.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.experience import ReplayBuffer
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.trainable_model import TrainableModel
from openppo.types import Experience

PARTITION_EVERYTHING = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
N_WEIGHTS = 64


class Weights(nn.Module):
    """A vector of ones, whose gradient is whatever it is multiplied with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N_WEIGHTS, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum()


def make_regressor() -> nn.Module:
    """The network of the clipping experiment."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def regression_step(step: int) -> tuple[Tensor, Tensor]:
    """Inputs (24, 6) and targets (24, 1), further away at odd steps."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 6, generator=generator)
    return inputs, (0.1, 10.0)[step % 2] * torch.randn(24, 1, generator=generator)


def strategy_of(zero_stage: Any, bf16: bool = False, max_norm: float = 0.0) -> DeepspeedStrategy:
    config = DeepSpeedConfig(zero_stage=zero_stage, bf16=bf16, max_norm=max_norm)
    return DeepspeedStrategy(config, timedelta(seconds=60), PARTITION_EVERYTHING)


def weights_of(strategy: DeepspeedStrategy, engine: TrainableModel) -> list[Tensor]:
    """Copies of all parameters in full."""
    with strategy.gathered(engine):
        return [p.detach().float().clone() for p in engine.module.parameters()]


def schedule(zero_stage: int) -> dict[str, list[float]]:
    """40 steps along a constant gradient; Adam then moves by the learning rate exactly."""
    strategy = strategy_of(zero_stage)
    engine = strategy.prepare(Weights(torch.float32), AdamConfig(lr_warmup_ratio=0.1), 0.01, total_steps=40)
    rates, weights = [], [1.0]
    for _ in range(40):
        rates.append(engine.learning_rate)
        engine.backward(engine(1.0), last=True)
        engine.step()
        weights.append(weights_of(strategy, engine)[0].mean().item())
    return {"rates": rates, "weights": weights}


def tiny_updates(zero_stage: int) -> dict[str, list[float]]:
    """40 steps of 1e-4 from 1.0 in bfloat16, whose next number below is 0.996."""
    strategy = strategy_of(zero_stage, bf16=True)
    constant = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
    engine = strategy.prepare(Weights(torch.bfloat16), constant, 1e-4, total_steps=40)
    weights = []
    for _ in range(40):
        engine.backward(engine(1.0), last=True)
        engine.step()
        weights.append(weights_of(strategy, engine)[0].mean().item())
    return {"weights": weights}


def small_gradients(zero_stage: int) -> dict[str, float]:
    """A gradient of 1 and eight of 1/1024: in bfloat16 the sum would stay 1."""
    strategy = strategy_of(zero_stage, bf16=True)
    engine = strategy.prepare(Weights(torch.bfloat16), AdamConfig(), 1e-4, total_steps=4)
    gradients = [1.0] + [2.0**-10] * 8
    for i, gradient in enumerate(gradients):
        engine.backward(engine(gradient), last=i == 8)
    return {"norm": engine.step()}


def small_gradient_of_a_rank(zero_stage: int) -> dict[str, float]:
    """Twice gradients of 1 on rank 0 and 1/1024 on rank 1: in bfloat16 their sum would be 1."""
    strategy = strategy_of(zero_stage, bf16=True)
    engine = strategy.prepare(Weights(torch.bfloat16), AdamConfig(), 1e-4, total_steps=4)
    for last in (False, True):
        engine.backward(engine(2.0 ** (-10 * strategy.comm.rank)), last=last)
    return {"norm": engine.step()}


def clipping(zero_stage: int, max_norm: float) -> dict[str, Any]:
    """Six steps of regression on both ranks' halves of the data, in micro-batches of 5, 5 and 2."""
    strategy = strategy_of(zero_stage, max_norm=max_norm)
    constant = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
    engine = strategy.prepare(make_regressor(), constant, 1e-2, total_steps=6)
    norms, rank = [], strategy.comm.rank
    for step in range(6):
        inputs, targets = (tensor.chunk(strategy.comm.world_size)[rank].split(5) for tensor in regression_step(step))
        for i, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            loss = (engine(x) - y).square().sum() / 24 * strategy.comm.world_size
            engine.backward(loss, last=i == len(inputs) - 1)
        norms.append(engine.step())
    return {"norms": norms, "weights": [w.flatten().tolist() for w in weights_of(strategy, engine)]}


def experience(values: Tensor, mask: Tensor) -> Experience:
    zeros = torch.zeros(values.shape)
    return Experience(
        sequences=torch.zeros(values.shape, dtype=torch.int64),
        attention_mask=torch.ones(values.shape, dtype=torch.bool),
        action_mask=mask,
        rollout_log_probs=zeros,
        scores=zeros[:, 0],
        truncated=mask[:, 0],
        advantages=torch.where(mask, values, 0.0),
    )


def normalization(rows_of_ranks: tuple[int, ...]) -> dict[str, Any]:
    """Advantages around 1000 of each rank's rows, before and after; with their masks."""
    strategy = strategy_of(0)
    rank = strategy.comm.rank
    generator = torch.Generator().manual_seed(rank)
    buffer = ReplayBuffer(strategy.comm)
    for length in range(3, 3 + rows_of_ranks[rank]):
        values = 1000 + (1 + rank) * torch.randn(1, length, generator=generator)
        buffer.append(experience(values, torch.rand(1, length, generator=generator) < 0.6))

    def state() -> list[Any]:
        return [(item.advantages[0].tolist(), item.action_mask[0].tolist()) for item in buffer.items]  # type: ignore

    before = state()
    buffer.normalize("advantages")
    gathered = strategy.comm.all_gather_object((before, state()))
    return {"before": [row for b, _ in gathered for row in b], "after": [row for _, a in gathered for row in a]}


def leave() -> None:
    """End at once: a thread of gloo that frees a tensor while Python shuts down may abort the process."""
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """All experiments."""
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        results[f"schedule {stage}"] = schedule(stage)
        results[f"tiny updates {stage}"] = tiny_updates(stage)
        results[f"small gradients {stage}"] = small_gradients(stage)
        results[f"small gradient of a rank {stage}"] = small_gradient_of_a_rank(stage)
        for max_norm in (0.0, 0.5):
            results[f"clipping {stage} {max_norm}"] = clipping(stage, max_norm)
    results["normalization"] = normalization((3, 6))
    results["normalization without rows on a rank"] = normalization((0, 6))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "engine.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
