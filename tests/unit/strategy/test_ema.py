"""The averages of one rank; ZeRO stages and several ranks are in tests/distributed/test_lora.py."""

from typing import Any

import pytest
from torch import nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy.ema import ParameterAverage


def average_of(*widths: int) -> tuple[nn.Module, ParameterAverage]:
    module: Any = nn.Sequential(*(nn.Linear(width, 1) for width in widths))
    module[-1].requires_grad_(False)
    engine = DeepspeedStrategy(DeepSpeedConfig(zero_stage=0)).prepare(module, AdamConfig(), 1e-3, total_steps=1)
    return module, ParameterAverage(engine, beta=0.75)


def test_only_trained_parameters_are_averaged_by_hand_computed_numbers() -> None:
    module, ema = average_of(1, 3)
    weight = module[0].weight
    nn.init.constant_(weight, 8.0)
    ema.fragments()["0.weight"].values.fill_(4.0)
    ema.update()  # 0.75 * 4 + 0.25 * 8
    with ema.swapped_in():
        assert weight.item() == 5.0
    assert weight.item() == 8.0
    nn.init.constant_(weight, 1.0)
    ema.update()  # 0.75 * 5 + 0.25 * 1
    assert ema.fragments()["0.weight"].values.tolist() == [4.0]
    assert ema.fragments().keys() == {"0.weight", "0.bias"}


def test_the_weights_come_back_after_an_error() -> None:
    module, ema = average_of(2, 3)
    nn.init.constant_(module[0].weight, 8.0)
    with pytest.raises(OSError), ema.swapped_in():
        raise OSError("disk full")
    assert module[0].weight.eq(8.0).all()
