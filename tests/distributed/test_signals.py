"""Signals to any process ask all ranks to save and exit, and runs resume; torchrun is real, since it passes them on."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.distributed.runs import logged, vector
from tests.distributed.watched import (
    REPORT,
    OnLine,
    descendants,
    rank_process,
    small_ppo,
    torchrun,
    watch,
)
from tests.fork_server import ENVIRONMENT, REPO

SAVES = "saving a checkpoint, then exiting"


def once_both_work(signals: dict[str, signal.Signals], again: str = "") -> OnLine:
    """Sends signals to processes by name once both ranks work, and to ``again`` a second time when rank 1 has heard."""
    pids: dict[str, int] = {}

    def on_line(line: str, process: "subprocess.Popen[str]") -> None:
        if found := re.match(r"(rank \d) (\d+) works", line):
            pids[found[1]] = int(found[2])
            if len(pids) == 2:
                pids["torchrun"] = process.pid
                time.sleep(1.5)
                for name, number in signals.items():
                    os.kill(pids[name], number)
        elif again and re.match(r"rank 1 \d+ was asked", line):
            time.sleep(3)
            os.kill(pids[again], signals[again])

    return on_line


@pytest.mark.parametrize(
    ("number", "to", "status"),
    [
        pytest.param(signal.SIGTERM, ["rank 1"], 0, marks=pytest.mark.slow),
        (signal.SIGHUP, ["rank 0"], 0),
        (signal.SIGINT, ["torchrun"], 1),
        (signal.SIGTERM, ["torchrun", "rank 0", "rank 1"], 1),  # as Slurm
    ],
)
def test_a_signal_to_any_process_reaches_all_ranks(tmp_path, number, to, status):
    ended = torchrun(
        "run_signals.py", 3, cwd=tmp_path, on_line=once_both_work(dict.fromkeys(to, number))
    )
    for rank in (0, 1):
        assert re.search(
            rf"^rank {rank} \d+ was asked by {number.name}", ended.output, flags=re.MULTILINE
        )
        assert re.search(rf"^rank {rank} \d+ has left", ended.output, flags=re.MULTILINE)
    assert ended.output.count(f"{number.name}: {SAVES}") == 1
    assert REPORT not in ended.output
    assert ended.status == status, "torchrun that got the signal itself ends with 1"


def test_a_second_signal_ends_all_ranks_at_once(tmp_path):
    on_line = once_both_work({"rank 0": signal.SIGTERM}, again="rank 0")
    ended = torchrun("run_signals.py", 100_000, cwd=tmp_path, on_line=on_line)
    says = "SIGTERM: a second signal, ended at once in phase training"
    assert [line.strip() for line in ended.output.splitlines() if says in line] == [
        says,
        f"traceback : {says}",
    ]
    assert "has saved" not in ended.output
    assert REPORT not in ended.output
    assert "exitcode  : 143" in ended.output


def test_a_signal_while_loading_ends_the_run_with_one_line(tiny, tmp_path):
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("fault at"):
            process.terminate()

    place = ("sleep", 1, "loading", 0, "train_ppo", *small_ppo(tiny, tmp_path))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.output.count("SIGTERM: ended in phase loading") == 1
    assert REPORT not in ended.output


def test_a_run_that_is_stopped_for_a_moment_continues(tiny, tmp_path):
    """As by Ctrl-Z and ``fg``: torchrun and all ranks."""

    def freeze(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            # Not what ranks start: a rank does not stop while it waits for a child stopped between fork and exec.
            for number, pause in ((signal.SIGSTOP, 9), (signal.SIGCONT, 0)):
                for pid in (
                    process.pid,
                    *(child.pid for child in descendants(process.pid, recursive=False)),
                ):
                    os.kill(pid, number)
                time.sleep(pause)

    place = ("none", 0, "", 0, "train_ppo", *small_ppo(tiny, tmp_path, "--heartbeat_timeout 20"))
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=freeze)
    assert ended.status == 0, ended.output
    assert "step 3/3" in ended.output


def test_a_lost_terminal_ends_the_run_with_a_checkpoint(tiny, tmp_path):
    flags = f"""--pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --train_batch_size 2 --micro_train_batch_size 2
        --max_epochs 100000 --save_steps 0 --save_path {tmp_path}/model"""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
        os.environ |= ENVIRONMENT
        os.execv(sys.executable, [sys.executable, "-m", "openppo.cli.train_sft", *flags.split()])
    printed = b""
    while len(logged(tmp_path / "model")) < 3:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), printed.decode(errors="replace")
        printed += os.read(terminal, 1 << 16)
    os.close(terminal)  # the kernel sends SIGHUP, and all output is an error from now on
    timer = threading.Timer(600, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    assert os.waitstatus_to_exitcode(status) == 0
    state = json.loads(
        (tmp_path / "model" / "checkpoints_sft" / "latest" / "state.json").read_text()
    )
    assert state["step"] >= 3


def test_the_elastic_script_resumes_from_its_newest_checkpoint(tiny, tmp_path):
    killed: list[int] = []

    def kill_rank_1(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 2/") and not killed:
            killed.append(rank_process(process.pid, 1))
            os.kill(killed[0], signal.SIGKILL)

    sizes = small_ppo(tiny, tmp_path)[4:-4]
    more = [*sizes, *"--no_apply_chat_template --num_episodes 3 --actor_learning_rate 1e-3".split()]
    script = ["bash", str(REPO / "examples" / "scripts" / "elastic.sh"), *more]
    folders = {
        "MODEL": tiny / "actor",
        "REWARD_MODEL": tiny / "reward",
        "DATA": tiny / "prompts.jsonl",
    }
    variables = {"GPUS": 2, "RESTARTS": 1, "SAVE_STEPS": 1, **folders}
    real = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = watch(script, tmp_path, kill_rank_1, SAVE_PATH="disturbed", PATH=real, **variables)
    assert ended.status == 0, ended.output
    assert "rank 1 is gone: its process has ended" in ended.row("fault")
    (step,) = re.findall(r"from \S+/step_(\d+)$", ended.output, flags=re.MULTILINE)
    assert int(step) >= 1, "it was saved before step 2 ended"
    assert watch(script, tmp_path, SAVE_PATH="undisturbed", PATH=real, **variables).status == 0
    assert vector(tmp_path / "disturbed").equal(vector(tmp_path / "undisturbed"))


def test_a_signal_saves_and_the_same_command_resumes(tiny, tmp_path, launch):
    def send(line: str, process: "subprocess.Popen[str]") -> None:
        if line.startswith("step 1/"):
            os.kill(rank_process(process.pid, 1), signal.SIGTERM)

    # Rank 1 waits in step 2 until the signal has come.
    options = "--zero_stage 3 --save_steps 1 --load_checkpoint --actor_learning_rate 1e-3"
    command = small_ppo(tiny, tmp_path, options)
    place = ("wait_for_signal", 1, "training", 2, "train_ppo", *command)
    ended = torchrun("run_faults.py", *place, cwd=tmp_path, on_line=send)
    assert ended.status == 0, ended.output
    assert ended.output.count("SIGTERM: saving a checkpoint, then exiting") == 1
    assert not (tmp_path / "model" / "model.safetensors").exists()
    for words in (command, small_ppo(tiny, tmp_path / "undisturbed", options)):
        launch(2, "-m", "openppo.cli.train_ppo", *words, cwd=tmp_path)
    assert vector(tmp_path / "model").equal(vector(tmp_path / "undisturbed/model"))
