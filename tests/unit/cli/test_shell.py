"""The program ``openppo`` runs the commands, and ``--version`` says what a bug report needs and no more."""

import getpass
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from openppo import __version__
from openppo.__main__ import commands
from tests.fork_server import PYTHON_PATH

REPO = Path(__file__).parents[3]


def openppo(
    *arguments: str, module: str = "openppo", **env: str
) -> subprocess.CompletedProcess[str]:
    """What ``python -m openppo ARGUMENTS`` does."""
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"} | env
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)


def test_help_lists_every_module_that_runs_with_what_it_is_for():
    runnable = {
        file.stem: file
        for file in (REPO / "openppo/cli").glob("*.py")
        if "__main__" in file.read_text()
    }
    printed = openppo("--help").stdout
    listed = dict(re.findall(r"^  (\w+) +(\S.*)$", printed, flags=re.MULTILINE))
    assert listed.keys() == runnable.keys() == commands().keys()
    assert [
        name for name, purpose in listed.items() if purpose not in runnable[name].read_text()
    ] == []
    assert (openppo().stdout, openppo().returncode) == (printed, 2)


UNKNOWN = "error: unknown flag --eps_clipp; did you mean --eps_clip?\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "openppo train_pp0 --help",
            "error: openppo has no command train_pp0; did you mean train_ppo?\n",
        ),
        ("openppo train-ppo --eps_clipp 1", UNKNOWN),
        ("openppo.cli.train_ppo --eps_clipp 1", UNKNOWN),
    ],
)
def test_a_command_gets_its_flags_and_an_unknown_one_the_nearest_name(line, says):
    module, *arguments = line.split()
    done = openppo(*arguments, module=module)
    assert (done.returncode, done.stderr, done.stdout) == (2, says, "")


@pytest.mark.parametrize(
    "arguments",
    [
        "openppo --help",
        "openppo --version",
        "openppo train_ppo --help",
        "openppo.cli.report --help",
    ],
)
def test_output_that_nobody_reads_ends_a_command_quietly(arguments):
    """As ``openppo train_ppo --help | head`` does, where head has ended."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *arguments.split()]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        command, env=environment, cwd="/", stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("module", ["openppo", "openppo.cli.report", "openppo.cli.merge_lora"])
def test_version_prints_what_a_bug_report_needs_and_no_name_path_or_secret(module, tmp_path):
    answer, secret = "NVIDIA H200, 143771 MiB, 570.1", "hf_tell_nobody"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{answer}\n{answer}\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {"HF_TOKEN": secret, "WANDB_API_KEY": secret, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = openppo("--version", module=module, **env)
    assert done.returncode == 0, done.stderr
    said = dict(re.split(r" {2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert said["openppo"].startswith(__version__)
    assert said["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert said["torch"] == torch.__version__
    for package in ("transformers", "deepspeed", "peft", "datasets", "tokenizers"):
        assert said[package] == version(package)
    assert re.fullmatch(r"\w+, \d+ cores", said["processor"])
    assert re.fullmatch(r"\w+, \d+ threads", said["CPU kernels"])
    assert re.fullmatch(r"\d+\.\d GiB", said["memory"])
    assert {"CUDA", "system"} <= said.keys()
    assert said["GPU 0"] == said["GPU 1"] == f"{answer} (driver)"
    git = subprocess.run(
        ["git", "-C", str(REPO), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    assert git.returncode != 0 or f"(commit {git.stdout.strip()}" in said["openppo"]
    private = {secret, str(Path.home()), str(REPO), socket.gethostname(), sys.prefix}
    assert [text for text in private if text in done.stdout] == []
    assert not re.search(rf"\b{getpass.getuser()}\b", done.stdout)
    assert "/" not in done.stdout.replace("GNU/Linux", "")


def test_version_answers_where_torch_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text(
        "raise OSError('/home/somebody/libcudart.so: cannot open shared object file')"
    )
    done = openppo("--version", PYTHONPATH=f"{tmp_path}:{REPO}")
    assert done.returncode == 0, done.stderr
    assert f"{version('torch')} (import fails with OSError)" in done.stdout
    assert "somebody" not in done.stdout
