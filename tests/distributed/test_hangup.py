"""A run whose terminal goes away saves a checkpoint, and what it can no longer print does not matter."""

import json
import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def test_a_lost_terminal_ends_the_run_with_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    flags = f"""--pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --train_batch_size 2 --micro_train_batch_size 2
        --max_epochs 100000 --save_steps 0 --save_path {tmp_path}/model"""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
        os.execv(sys.executable, [sys.executable, "-m", "openppo.cli.train_sft", *flags.split()])
    metrics, printed = tmp_path / "model" / "logs" / "metrics.jsonl", b""
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), printed.decode(errors="replace")
        printed += os.read(terminal, 1 << 16)
    os.close(terminal)  # the kernel sends SIGHUP, and all output is an error from now on
    for _ in range(6000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, 9)
        pytest.fail("it did not end")
    assert os.waitstatus_to_exitcode(status) == 0
    state = json.loads((tmp_path / "model" / "checkpoints_sft" / "latest" / "state.json").read_text())
    assert state["step"] >= 3
