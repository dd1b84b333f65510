"""What torch and DeepSpeed compile is announced, and what they cannot compile is known before they try."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy import deepspeed as module


@pytest.mark.parametrize("compiler", ["c++", None])
def test_offloading_says_whether_it_compiles_before_it_does(
    compiler: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_adam(*parameters: Any, **options: Any) -> None:
        assert "--adam_offload: compiling DeepSpeed's CPU Adam, about 100 seconds" in caplog.text

    monkeypatch.setattr("shutil.which", lambda name: compiler)
    monkeypatch.setattr(module, "DeepSpeedCPUAdam", compile_adam)
    strategy = DeepspeedStrategy(DeepSpeedConfig(adam_offload=True))
    with caplog.at_level(logging.INFO, "openppo"):
        made = strategy._adam(list(nn.Linear(1, 1).parameters()), AdamConfig(), 1e-3)
    assert type(made) is (torch.optim.AdamW if compiler is None else type(None))
    if compiler is None:
        assert "no C++ compiler" in caplog.text
        with pytest.raises(ValueError, match="--compile cannot .*: .*no C.. compiler.*leave --compile out"):
            module._compile_layers(nn.Linear(1, 1), torch.device("cpu"))
