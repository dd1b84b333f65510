"""Joining a process group that is not whole, and errors of one rank that all raise."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch

from openppo.strategy.comm import collective, init_process_group
from tests.ranks import ThreadComm, on_ranks

HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("ranks", "failing", "message"),
    [
        (1, {0}, "saving: no such file."),
        (3, {1}, f"saving: on rank 1 ({HOST}): no such file."),
        (4, {1, 3}, f"saving: on rank 1 ({HOST}), rank 3 ({HOST}): no such file."),
        (2, {0, 1}, "saving: no such file."),
    ],
)
def test_an_error_of_one_rank_is_translated_and_raised_on_all(ranks, failing, message):
    def work(comm: ThreadComm) -> Any:
        def read() -> str:
            if comm.rank in failing:
                raise PermissionError("no such file.")
            return f"rows of {comm.rank}"

        return collective(
            comm, read, (OSError, EOFError), lambda text: RuntimeError(f"saving: {text}")
        )

    assert [str(error) for error in on_ranks(ranks, work, (RuntimeError,))] == [message] * ranks
    failing.clear()
    assert on_ranks(ranks, work) == [f"rows of {rank}" for rank in range(ranks)]


def test_more_ranks_than_gpus_is_an_error_with_their_number(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--nproc_per_node .*1 GPUs"):
        init_process_group(timedelta(seconds=1))


def test_a_single_process_makes_no_ranks_of_its_subprocesses():
    program = """
import os
from datetime import timedelta
from openppo.strategy.comm import TorchComm, init_process_group
before = dict(os.environ)
init_process_group(timedelta(seconds=60))
print(TorchComm().all_gather_object("here"), sorted(os.environ.keys() - before.keys()))
"""
    alone = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=alone, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "['here'] ['LOCAL_RANK']\n", done.stderr


def test_missing_ranks_and_a_missing_first_host_are_named():
    def start_joining(rank: str, port: int) -> "subprocess.Popen[str]":
        """A process that joins a group of three on this machine, for up to three seconds."""
        program = "from openppo.strategy.comm import *; init_process_group(timedelta(seconds=3))"
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
        torchrun = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_PORT": str(port),
        }
        words = [sys.executable, "-c", program]
        return subprocess.Popen(
            words, env=os.environ | group | torchrun, stderr=subprocess.PIPE, text=True
        )

    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # torchrun has one
    joining = [
        start_joining("0", store.port),
        start_joining("2", store.port),
        start_joining("1", 1),
    ]
    *others, lone = (process.communicate(timeout=100)[1] for process in joining)
    assert all("ValueError: rank 1 of 3 did not start within 3 s" in message for message in others)
    assert "ValueError: rank 0 was not reached at 127.0.0.1:1 within 3 s" in lone
