"""Compilations of DeepSpeed's CPU Adam that are killed, wait for each other, or fail."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.watched import descendants, small_ppo, watch
from tests.fork_server import ENVIRONMENT

LOADS = """
from openppo.strategy.deepspeed import load_cpu_adam
from openppo.tracking import setup_logging

setup_logging(0)
load_cpu_adam()
"""
SLEEPS = """#!/bin/sh
case "$*" in *" -c "*) touch compiling; exec sleep 600 ;; *) exec c++ "$@" ;; esac
"""
FAILS = """#!/bin/sh
case "$*" in *" -c "*) echo "cannot compile today" >&2; exit 1 ;; *) exec c++ "$@" ;; esac
"""
REMOVED = "cpu_adam/lock, which an interrupted compilation has left"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a process that loads the operators, with the text of its compiler."""
    started = []

    def run(compiler: str) -> "subprocess.Popen[str]":
        file = tmp_path / f"compiler_{len(started)}"
        file.write_text(compiler)
        file.chmod(0o755)
        own = {
            "CXX": str(file),
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "built"),
            "DS_ACCELERATOR": "cpu",
        }
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        environment = os.environ | ENVIRONMENT | own
        started.append(
            subprocess.Popen([sys.executable, "-c", LOADS], cwd=tmp_path, env=environment, **pipes)
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Fail unless ``holds()`` within so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def names_below(pid: int) -> set[str]:
    """Names of the processes that a process has started, and those that they have."""
    names = set[str]()
    for process in descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            names.add(process.name())
    return names


def test_a_killed_compilation_ends_whole_and_blocks_nobody(start, tmp_path):
    killed = start(SLEEPS)
    wait_until((tmp_path / "built/cpu_adam/compiling").exists, 120)
    wait_until(lambda: {"ninja", "sleep"} <= names_below(killed.pid), 30)
    compilers = descendants(killed.pid)
    assert killed.stdout is not None
    assert (
        "compiling DeepSpeed's CPU Adam, about 100 seconds the first time"
        in killed.stdout.readline()
    )
    waiting = start(FAILS)
    assert waiting.stdout is not None
    assert "waiting for another process that compiles" in waiting.stdout.readline()
    killed.kill()
    wait_until(lambda: not any(process.is_running() for process in compilers), 10)
    output = waiting.communicate(timeout=120)[0]
    assert REMOVED in output and "cannot compile today" in output
    assert output.endswith("see above). Correct the compiler, or omit the flag.\n")
    assert not (tmp_path / "built/cpu_adam/lock").exists()


@pytest.mark.slow
def test_a_run_after_a_killed_one_compiles_and_trains(tiny, tmp_path):
    def kill(line: str, process: "subprocess.Popen[str]") -> None:
        if "compiling DeepSpeed's CPU Adam" in line:
            wait_until((tmp_path / "built/cpu_adam/lock").exists, 120)
            time.sleep(5)
            process.kill()

    options = small_ppo(tiny, tmp_path, "--adam_offload --zero_stage 2")
    alone = [sys.executable, "-m", "openppo.cli.train_ppo", *options]
    ranks = [
        sys.executable,
        "-m",
        *"torch.distributed.run --standalone --nproc_per_node 2".split(),
        *alone[1:],
    ]
    folder = str(tmp_path / "built")
    watch(alone, tmp_path, kill, TORCH_EXTENSIONS_DIR=folder)
    assert (tmp_path / "built/cpu_adam/lock").exists()
    second = watch(ranks, tmp_path, TORCH_EXTENSIONS_DIR=folder)
    assert second.status == 0, second.output
    assert second.output.count(REMOVED) == 1
    third = watch(alone, tmp_path, TORCH_EXTENSIONS_DIR=folder)
    assert third.status == 0 and "compiling" not in third.output
