"""generate on a GPU writes what it writes on the CPU."""

import json
import os
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


def test_greedy_responses_on_the_gpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(REPO / "examples/sort_letters.py"), "make", "--out", str(tmp_path)], check=True)
    command = [sys.executable, "-m", "openppo.cli.generate", "--pretrain", "model", "--prompt_data", "heldout.jsonl"]
    command += ["--max_samples", "20", "--generate_max_len", "8", "--output_path"]
    for device, more in (("gpu", {}), ("cpu", {"CUDA_VISIBLE_DEVICES": ""})):
        environment = os.environ | {"PYTHONPATH": str(REPO)} | more
        done = subprocess.run([*command, device], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]
    files = (tmp_path / name for name in ("gpu", "cpu"))
    on_gpu, on_cpu = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    for line in on_cpu:
        line["mean_log_prob"] = pytest.approx(line["mean_log_prob"], abs=1e-3)
    assert on_gpu == on_cpu
