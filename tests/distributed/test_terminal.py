"""A run on a terminal of 80 columns."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from tests.fork_server import ENVIRONMENT

COLUMNS = 80


def on_terminal(words: list[str], folder: Path) -> list[str]:
    """The lines that ``python WORDS`` leaves on a terminal, without colours and vanished bars."""
    terminal, program_side = pty.openpty()
    fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    } | ENVIRONMENT
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), program_side)
    process = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **streams)
    os.close(program_side)
    printed = b""
    with suppress(OSError):  # Linux ends a terminal that nobody writes to any more with EIO
        while chunk := os.read(terminal, 65536):
            printed += chunk
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed.decode())
    assert process.wait() == 0, text
    return [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]


def test_a_run_fits_80_columns_and_shows_a_sample_of_step_1(tiny: Path, tmp_path: Path) -> None:
    flags = f"""--pretrain {tiny}/actor --reward_pretrain {tiny}/reward --prompt_data {tiny}/prompts.jsonl
        --label_key label --eval_data {tiny}/prompts.jsonl --pass_reward 0 --max_samples 8 --generate_max_len 8
        --rollout_batch_size 4 --train_batch_size 4 --save_path model"""
    lines = on_terminal(["-m", "openppo.cli.train_ppo", *flags.split()], tmp_path)
    assert [line for line in lines if len(line) > COLUMNS and " " in line.strip()] == [], (
        "only a long path may"
    )
    starts = [" ".join(line.split()[:3]) for line in lines]
    (table,) = (i for i, line in enumerate(lines) if line == f"actor      {tiny}/actor")
    assert lines[table + 1].split(", ")[1:] == ["fp32", "cpu", "ZeRO-2"]
    sample, step = starts.index("sample of step"), starts.index("step 1/2 |")
    assert table < sample < step, "a sample of step 1 stands above its metrics"
    assert [line.split()[0] for line in lines[sample : sample + 3]] == [
        "sample",
        "prompt",
        "response",
    ]
    assert "the report of this run is model/logs/report.html" in lines
