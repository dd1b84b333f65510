"""The learning rate of each optimizer step, against plain formulas; no step is thrown away."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch
from torch import nn

from openppo.config import AdamConfig
from openppo.strategy.checkpoint.model_state import _set_schedule
from openppo.strategy.deepspeed import learning_rate_schedule

PEAK, TOTAL, WARM_UP = 0.5, 20, 4
FALLS: dict[str, Callable[[float], float]] = {  # of the share of steps after the warm-up
    "cosine_with_min_lr": lambda x: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * x)),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda x: 1 - x,
    "constant_with_warmup": lambda x: 1.0,
}


def rates(name: Any, ratio: float, total: int = TOTAL, position: int = 0) -> list[float]:
    """The rates of all steps, from ``position`` on in a run that resumes there."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    made: Any = learning_rate_schedule(optimizer, AdamConfig(lr_scheduler=name, lr_warmup_ratio=ratio), total)
    if position:
        _set_schedule(cast(Any, SimpleNamespace(scheduler=made)), position)
    found = []
    for _ in range(position, total):
        assert made.get_last_lr()[0] == optimizer.param_groups[0]["lr"]
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize("name", list(FALLS))
def test_rates_rise_in_equal_steps_above_zero_and_then_fall(name: str) -> None:
    up = [PEAK * (step + 1) / WARM_UP for step in range(WARM_UP)]
    down = [PEAK * FALLS[name]((step - WARM_UP) / (TOTAL - WARM_UP)) for step in range(WARM_UP, TOTAL)]
    assert rates(name, 0.2) == pytest.approx(up + down)


def test_the_first_step_changes_weights_whatever_the_options() -> None:
    assert set(get_args(get_type_hints(AdamConfig)["lr_scheduler"])) == {*FALLS, "constant"}
    assert rates("constant", 0.5) == [PEAK] * TOTAL
    for name in FALLS:
        assert all(rates(name, *case)[0] > 0 for case in ((0.0, 5), (0.03, 34), (0.5, 2), (1.0, 3)))


@pytest.mark.parametrize("position", range(0, TOTAL, 3))
def test_a_resumed_schedule_continues_where_it_was(position: int) -> None:
    assert rates("cosine_with_min_lr", 0.2, position=position) == rates("cosine_with_min_lr", 0.2)[position:]
