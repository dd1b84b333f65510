"""What is light to use is light to import; checked in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from openppo.__main__ import commands

REPO = Path(__file__).resolve().parents[2]
PYTHON_PATH = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
HEAVY = {"torch", "transformers", "deepspeed", "peft", "datasets", "vllm"}


def python(*arguments: str) -> tuple[str, set[str]]:
    """What Python prints with our package on its path, and the top-level modules that it imports."""
    command = [sys.executable, "-X", "importtime", *arguments]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    result = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=300
    )
    times = [line for line in result.stderr.splitlines() if line.startswith("import time:")]
    assert result.returncode == 0, result.stderr
    return result.stdout, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in times}


def test_config_is_light_and_losses_need_torch_alone():
    assert python("-c", "import openppo.config")[1] & HEAVY == set()
    assert python("-c", "import openppo.models.loss; from openppo.models import PolicyLoss")[
        1
    ] & HEAVY == {"torch"}


def test_nouns_need_torch_alone():
    loaded = python("-c", "import openppo.types")[1]
    assert loaded & HEAVY == {"torch"}
    assert "huggingface_hub" not in loaded


@pytest.mark.parametrize("command", commands())
def test_help_answers_without_loading_anything_heavy(command):
    printed, loaded = python("-m", f"openppo.cli.{command}", "--help")
    assert "usage" in printed.lower()
    assert loaded & HEAVY == set()
