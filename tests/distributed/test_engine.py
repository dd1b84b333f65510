"""What DeepSpeed does with our configuration, on two real ranks and for each ZeRO stage, against plain formulas."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).with_name("run_engine.py")
STAGES = pytest.mark.parametrize("stage", (0, 1, 2, 3))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]) -> dict[str, Any]:
    """What each experiment of the script gave."""
    folder = tmp_path_factory.mktemp("engine")
    launch(2, SCRIPT, folder)
    return json.loads((folder / "engine.json").read_text())


@STAGES
def test_the_learning_rate_rises_for_the_warm_up_and_falls_along_a_cosine_to_a_tenth(
    results: dict[str, Any], stage: int
) -> None:
    peak, total, warm_up = 0.01, 40, 4
    formula = [
        peak * (t + 1) / warm_up
        if t < warm_up
        else peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - warm_up) / (total - warm_up))))
        for t in range(total)
    ]
    result = results[f"schedule {stage}"]
    assert result["rates"] == pytest.approx(formula)
    assert formula[-1] == pytest.approx(0.1 * peak, rel=0.02)
    moved = [before - after for before, after in zip(result["weights"][:-1], result["weights"][1:], strict=True)]
    assert moved == pytest.approx(formula, rel=1e-3, abs=1e-6)  # and the optimizer really uses it


@STAGES
def test_updates_below_the_resolution_of_bfloat16_add_up(results: dict[str, Any], stage: int) -> None:
    weights = results[f"tiny updates {stage}"]["weights"]
    exact = torch.tensor([1 - 1e-4 * (step + 1) for step in range(40)])
    assert weights == exact.bfloat16().float().tolist()
    assert weights[0] == 1.0
    assert weights[-1] < 1.0


@STAGES
def test_gradients_of_micro_batches_are_added_in_float32(results: dict[str, Any], stage: int) -> None:
    norm = results[f"small gradients {stage}"]["norm"]
    assert norm == pytest.approx(math.sqrt(64) * (1 + 8 / 1024), rel=1e-5)


@STAGES
def test_gradients_of_ranks_are_averaged_in_float32(results: dict[str, Any], stage: int) -> None:
    norm = results[f"small gradient of a rank {stage}"]["norm"]
    assert norm == pytest.approx(math.sqrt(64) * (1 + 1 / 1024), rel=1e-5)


def naive_regression(max_norm: float) -> tuple[list[float], list[torch.Tensor]]:
    """The script's regression in one process and one batch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(24, 6, generator=generator)
        targets = (0.1, 10.0)[step % 2] * torch.randn(24, 1, generator=generator)
        adam.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf).item())
        adam.step()
    return norms, [p.detach().flatten() for p in model.parameters()]


@STAGES
@pytest.mark.parametrize("max_norm", (0.0, 0.5))
def test_the_gradient_of_all_ranks_is_clipped_by_its_global_norm(
    results: dict[str, Any], stage: int, max_norm: float
) -> None:
    result = results[f"clipping {stage} {max_norm}"]
    norms, weights = naive_regression(max_norm)
    assert result["norms"] == pytest.approx(norms, rel=1e-4)
    for got, want in zip(result["weights"], weights, strict=True):
        assert torch.allclose(torch.tensor(got), want, atol=1e-5)


def test_clipping_matters_in_that_experiment() -> None:
    norms, free = naive_regression(0.0)
    _, clipped = naive_regression(0.5)
    assert min(norms) < 0.5 < max(norms)
    assert (free[0] - clipped[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ("normalization", "normalization without rows on a rank"))
def test_advantages_are_normalized_over_the_action_tokens_of_all_ranks(results: dict[str, Any], name: str) -> None:
    before, after = ([(np.array(v), np.array(m)) for v, m in results[name][when]] for when in ("before", "after"))
    everything = np.concatenate([values[mask] for values, mask in before])
    assert len(everything) > 10
    for (old, mask), (new, _) in zip(before, after, strict=True):
        expected = np.where(mask, (old - everything.mean()) / np.sqrt(everything.var() + 1e-8), 0.0)
        assert new == pytest.approx(expected, abs=1e-5)
