"""What torch and DeepSpeed compile is announced, and what they cannot compile is known before they try."""

import logging
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from openppo.config import AdamConfig, DeepSpeedConfig
from openppo.strategy import DeepspeedStrategy
from openppo.strategy import deepspeed as module


def offloaded(monkeypatch: pytest.MonkeyPatch, on_compiling: Any) -> torch.optim.Optimizer:
    """The optimizer of ``--adam_offload``; ``on_compiling`` stands in for DeepSpeed's, which compiles."""
    monkeypatch.setattr(module, "DeepSpeedCPUAdam", on_compiling)
    strategy = DeepspeedStrategy(DeepSpeedConfig(adam_offload=True))
    return strategy._adam(list(nn.Linear(1, 1).parameters()), AdamConfig(), 1e-3)


def test_offloading_says_that_it_compiles_before_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(torch, "__file__", "/env/torch/__init__.py")
    with caplog.at_level(logging.INFO, "openppo"):
        offloaded(monkeypatch, lambda *parameters, **options: said.append(caplog.text))
    (before,) = said
    assert "--adam_offload: compiling DeepSpeed's CPU Adam, about 100 seconds" in before


@pytest.mark.parametrize(
    ("torch_file", "compiler", "reason"),
    [("/my envs/torch/__init__.py", "c++", "torch is in /my envs/torch, "), (torch.__file__, None, "no C++ compiler")],
)
def test_where_nothing_can_be_compiled_torchs_adam_steps(
    torch_file: str,
    compiler: str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    monkeypatch.setattr(torch, "__file__", torch_file)
    adam = offloaded(monkeypatch, lambda *parameters, **options: pytest.fail("compiled"))
    assert type(adam) is torch.optim.AdamW
    assert reason in caplog.text
    with pytest.raises(ValueError, match=f"--compile cannot .*: .*{re.escape(reason)}.*leave --compile out"):
        module._compile_layers(nn.Linear(1, 1), torch.device("cpu"))


@pytest.mark.parametrize(("gpu", "probed"), [(False, "True"), (True, "False")])
def test_imports_probe_operators_on_cpus_only_and_compile_nothing(gpu: bool, probed: str) -> None:
    """DeepSpeed imports its Muon optimizer, which is compiled, in the first step of any optimizer."""
    program = f"""
import sys, torch
from deepspeed import ops
torch.cuda.is_available = lambda: {gpu}
import openppo.strategy.deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer
print("__compatible_ops__" in vars(ops), "torch._inductor.compile_fx" in sys.modules)
"""
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == f"{probed} False", done.stderr
