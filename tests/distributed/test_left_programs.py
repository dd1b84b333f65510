"""Programs of agents end with their rank, whatever ends that."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.runs import OPTIONS
from tests.distributed.test_agent_programs import chat_model  # noqa: F401 (a fixture)
from tests.distributed.watched import REPORT, TORCHRUN, rank_process, watch

FAMILY = """
sh -c 'sleep 1000 & echo > programs/$PPID.$$.$!; wait' &
wait
"""
"""A program with a child and a grandchild; the name of a file has the ids of all."""
N_PROGRAMS = 8
FLAGS = f"""--config {OPTIONS}/four_programs.yaml
    --prompt_data tasks.jsonl --input_key question --save_path trained --generate_max_len 8 --init_kl_coef 0
    --advantage_estimator group_norm --n_samples_per_prompt 4 --rollout_batch_size 4 --train_batch_size 16
    --episode_max_len 160 --agent_command""".split()
Launcher = subprocess.Popen[str]


def kill_rank(launcher: Launcher) -> None:
    os.kill(rank_process(launcher.pid, 1), signal.SIGKILL)


def kill_launcher(launcher: Launcher) -> None:
    launcher.kill()


def kill_all(launcher: Launcher) -> None:
    ranks = [rank_process(launcher.pid, rank) for rank in (0, 1)]
    for pid in (launcher.pid, *ranks):
        os.kill(pid, signal.SIGKILL)


def alive(folder: Path) -> list[int]:
    """Those of the processes of all programs that have not ended."""
    pids = [int(pid) for file in folder.iterdir() for pid in file.name.split(".")]
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize(
    ("disturb", "restarts", "has_report"),
    [
        pytest.param(kill_rank, 0, True, id="kill -9 of a rank, report of the other"),
        pytest.param(kill_rank, 1, True, id="restart", marks=pytest.mark.slow),
        pytest.param(kill_launcher, 0, True, id="kill -9 of torchrun", marks=pytest.mark.slow),
        pytest.param(kill_all, 0, False, id="kill -9 of all", marks=pytest.mark.slow),
    ],
)
def test_no_program_outlives_its_rank(chat_model, tmp_path, disturb, restarts, has_report):  # noqa: F811
    folder = tmp_path / "programs"
    folder.mkdir()
    (tmp_path / "tasks.jsonl").write_text('{"question": "say it"}\n' * 8)
    (tmp_path / "program.sh").write_text(FAMILY)
    n_alive: list[int] = []
    """Processes of programs when all of a start run, before its ranks end."""

    def disturb_each_start(launcher: Launcher) -> None:
        for restart in range(1 + restarts):
            while (
                len(list(folder.iterdir())) < N_PROGRAMS * (1 + restart) and launcher.poll() is None
            ):
                time.sleep(0.1)
            n_alive.append(len(alive(folder)))
            disturb(launcher)

    def on_line(line: str, launcher: Launcher) -> None:
        if not thread:
            thread.append(threading.Thread(target=disturb_each_start, args=[launcher], daemon=True))
            thread[0].start()

    thread: list[threading.Thread] = []
    command = f"{TORCHRUN} --max_restarts {restarts} -m openppo.cli.train_ppo --pretrain {chat_model}".split()
    ended = watch([sys.executable, "-m", *command, *FLAGS, "sh program.sh"], tmp_path, on_line)
    assert ended.status != 0
    assert (REPORT in ended.output) is has_report
    assert n_alive == [3 * N_PROGRAMS] * (1 + restarts), "a restart has its own programs alone"
    deadline = time.monotonic() + 10
    while alive(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(folder) == []
