"""Optimizer steps with gradient norms in a few kernels equal DeepSpeed's own, on two ranks.

Launched by torchrun with a folder, this file trains a small module under each ZeRO stage and precision, with norms of
both kinds, and writes norms and weights to ``norms.json``.
"""

import json
import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy, deepspeed
from openppo.strategy.gradient_norm import join_gradient_norms
from tests.distributed.run_cases import leave

EXACT = [(1, False), (2, False), (2, True)]
"""ZeRO stages, and whether in bfloat16, whose norms are equal bit for bit."""
SETUPS = [*EXACT, (1, True)]
SPOILED = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf}
LARGE = {"square in float32": 1e16, "square beyond float32": 1e20}
JOIN = f"{deepspeed.__name__}.{join_gradient_norms.__name__}"
Result = dict[str, list[Any]]


def new_model(stage: Any, bf16: bool, max_norm: float, joined: bool) -> Any:
    """A module of 3 x 5 weights, 5 biases that are frozen, and a layer that is never used; it does not divide by 2."""

    def join(optimizer: Any, on_gpu: bool) -> None:
        if joined:
            assert join_gradient_norms(optimizer, on_gpu=True)

    strategy = DeepspeedStrategy(
        DeepSpeedConfig(zero_stage=stage, bf16=bf16, max_norm=max_norm), timedelta(seconds=60)
    )
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {"used": nn.Linear(3, 5), "second": nn.Linear(5, 7), "unused": nn.Linear(2, 1)}
    )
    module["used"].bias.requires_grad_(False)
    with mock.patch(JOIN, join):
        adam = AdamConfig(lr_scheduler="constant", lr_warmup_ratio=0)
        return strategy.prepare(
            module.to(torch.bfloat16 if bf16 else torch.float32), adam, 1e-2, total_steps=9
        )


def train(model: Any, scales: list[float]) -> Result:
    """Norm and weights after each step.

    On rank 1 the gradient of the second bias, which ZeRO-2 keeps there alone, is multiplied by a scale.
    """
    module, rank, result = model.module, torch.distributed.get_rank(), Result(norms=[], weights=[])
    module.forward = lambda inputs: module["second"](module["used"](inputs))
    generator = torch.Generator().manual_seed(rank)
    for scale in scales:
        inputs = torch.randn(4, 3, generator=generator).to(module["used"].weight.dtype)
        factor = scale if rank == 1 else 1.0
        hook = module["second"].bias.register_hook(
            lambda gradient, factor=factor: gradient * factor
        )
        model.backward(model(inputs).float().square().sum(), last=True)
        hook.remove()
        result["norms"].append(model.step())
        result["weights"].append(
            torch.cat([p.detach().flatten().float() for p in module.parameters()]).tolist()
        )
    return result


def main() -> None:
    """Train every setup, and gather what all ranks have."""
    results = {}
    for stage, bf16 in SETUPS:
        for max_norm in (0.0, 1.0):
            for name, scale in (("plain", 1.0), *SPOILED.items(), *LARGE.items()):
                for joined in (True, False):
                    model = new_model(stage, bf16, max_norm, joined)
                    result = train(model, [1.0, scale, 1.0])
                    ranks: list[Any] = [None, None]
                    torch.distributed.all_gather_object(ranks, result)
                    results[f"{stage} {bf16} {max_norm} {name} {joined}"] = ranks
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "norms.json").write_text(json.dumps(results))
    leave()


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]
) -> dict[str, list[Result]]:
    """Results of both ranks for each experiment of the script."""
    folder = tmp_path_factory.mktemp("norms")
    launch(2, __file__, folder)
    return json.loads((folder / "norms.json").read_text())


CLIPPING = pytest.mark.parametrize("max_norm", [0.0, 1.0])


@CLIPPING
@pytest.mark.parametrize("name", ["plain", *SPOILED, *LARGE])
@pytest.mark.parametrize(("stage", "bf16"), EXACT)
def test_steps_equal_those_of_deepspeed_bit_for_bit(results, stage, bf16, name, max_norm):
    setup = f"{stage} {bf16} {max_norm} {name}"
    assert results[f"{setup} True"] == results[f"{setup} False"]


@CLIPPING
@pytest.mark.parametrize("name", ["plain", *SPOILED, *LARGE])
def test_norms_of_flat_gradients_equal_those_of_deepspeed_but_for_rounding(results, name, max_norm):
    setup = f"1 True {max_norm} {name}"
    for own, joined in zip(results[f"{setup} False"], results[f"{setup} True"], strict=True):
        assert joined["norms"] == pytest.approx(own["norms"], rel=4e-7)
        for before, after in zip(own["weights"], joined["weights"], strict=True):
            assert after == pytest.approx(before, rel=2**-8)


@CLIPPING
@pytest.mark.parametrize("name", [*SPOILED, "square beyond float32"])
@pytest.mark.parametrize(("stage", "bf16"), SETUPS)
def test_a_spoiled_gradient_of_one_rank_skips_the_step_on_both(
    results, stage, bf16, name, max_norm
):
    ranks = results[f"{stage} {bf16} {max_norm} {name} True"]
    assert ranks[0] == ranks[1]
    assert [math.isfinite(norm) for norm in ranks[0]["norms"]] == [True, False, True]
    first, second, third = ranks[0]["weights"]
    assert first == second != third


@pytest.mark.parametrize(("stage", "bf16"), SETUPS)
def test_a_large_gradient_whose_square_is_finite_is_clipped(results, stage, bf16):
    assert results[f"{stage} {bf16} 1.0 square in float32 True"][0]["norms"][1] > 1e15


if __name__ == "__main__":
    main()
