"""The benchmark for GPUs runs on one, with a tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def test_the_benchmark_runs_with_a_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks/gpu.py"), "--shape", "tiny", "--steps", "1"]
    ended = subprocess.run(
        [*command, "--cache", str(tmp_path)], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines().count("no GPU: these figures mean nothing") == 0
    assert torch.cuda.get_device_name() in ended.stdout
    assert ended.stdout.count("| OpenPPO, tiny") == ended.stdout.count("| transformers, tiny") == 2
