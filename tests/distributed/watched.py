"""Runs that fail or get signals: how they are started, and what is read of their end."""

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from openppo.config import RunConfig
from tests.fork_server import ENVIRONMENT, SECONDS_UNTIL_A_HANG_IS_CERTAIN

HERE = Path(__file__).parent
TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
REPORT = "OpenPPO: the run has failed"
SECONDS_TO_END_AFTER_IT_IS_KNOWN = 15
"""As docs/faults.md promises."""
WATCHED = "OPENPPO_WATCHED_RUN"
"""The variable by which the processes of a run are known."""
OnLine = Callable[[str, "subprocess.Popen[str]"], None]


@dataclass
class Ended:
    """Output, status and end of a run."""

    words: list[str]
    output: str
    status: int
    left: float
    """When the last process had ended."""

    @property
    def report(self) -> str:
        """The one report; fails if there are more or none."""
        parts = re.split(rf"^=+ {REPORT} =+$", self.output, flags=re.MULTILINE)
        assert len(parts) == 2, f"{len(parts) - 1} reports:\n{self.output}"
        return re.split(r"^={100}$", parts[1], maxsplit=1, flags=re.MULTILINE)[0]

    def row(self, name: str) -> str:
        """The lines of the report that start with ``name:``."""
        return "\n".join(line for line in self.report.splitlines() if line.startswith(f"{name}:"))

    def is_in_time(self) -> None:
        """Check that all ranks had ended as soon as the options promise."""
        planted = float(re.findall(r"^fault at (\S+)$", self.output, flags=re.MULTILINE)[-1])
        promised = self._seconds("heartbeat_timeout") + SECONDS_TO_END_AFTER_IT_IS_KNOWN
        if "made no progress" in self.output:
            promised += self._seconds("stall_timeout")
        assert self.left - planted <= promised, self.output

    def _seconds(self, option: str) -> float:
        flag = f"--{option}"
        given = (
            self.words[self.words.index(flag) + 1]
            if flag in self.words
            else getattr(RunConfig, option)
        )
        return float(given)


def small_ppo(tiny: Path, folder: Path, options: str = "") -> list[str]:
    """Options of train_ppo for three steps; with a reward model unless ``options`` name a reward function."""
    reward = "" if "--reward_fn" in options else f"--reward_pretrain {tiny}/reward"
    return f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --rollout_batch_size 8 --train_batch_size 8
        --micro_train_batch_size 2 --micro_rollout_batch_size 4 --generate_max_len 8 --save_path {folder}/model
        {reward} {options}""".split()


def watch(words: list[str], cwd: Path, on_line: OnLine | None = None, **variables: object) -> Ended:
    """Run a command until its processes have ended; ``on_line`` sees each line. Fails if a process is left over."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **{name: str(value) for name, value in variables.items()},
        WATCHED: uuid.uuid4().hex,
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, cwd=cwd, env=environment, **pipes)
    family: set[psutil.Process] = set()
    timer = threading.Timer(
        SECONDS_UNTIL_A_HANG_IS_CERTAIN, lambda: kill_all_watched(environment[WATCHED])
    )
    timer.daemon = True
    timer.start()
    output = ""
    for line in process.stdout or ():  # until all processes that have it have ended
        output += line
        family |= {*descendants(process.pid)}
        if on_line is not None:
            on_line(line, process)
    status = process.wait()
    assert timer.is_alive(), f"did not end within {SECONDS_UNTIL_A_HANG_IS_CERTAIN} s:\n{output}"
    timer.cancel()
    deadline = time.monotonic() + 10  # a process closes its output a little before it has ended
    while (
        left := [member for member in family if _is_alive(member)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == [], output
    return Ended(words, output, status, time.time())


def kill_all_watched(run: str) -> None:
    """End all that a run has started, also what has left its family: it may hold the output open."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(WATCHED) == run:
                process.kill()


def torchrun(
    script: str,
    *arguments: object,
    cwd: Path,
    launcher: str = TORCHRUN,
    on_line: OnLine | None = None,
) -> Ended:
    """``watch`` a script on two ranks under a real launcher."""
    return watch(
        [sys.executable, "-m", *launcher.split(), str(HERE / script), *map(str, arguments)],
        cwd,
        on_line,
    )


def descendants(pid: int, recursive: bool = True) -> list[psutil.Process]:
    """The processes that a process has started, and those that they have."""
    with contextlib.suppress(psutil.Error):  # it has ended
        return psutil.Process(pid).children(recursive)
    return []


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank that torchrun, somewhere below ``launcher``, has started."""
    for process in descendants(launcher):
        with contextlib.suppress(psutil.Error):
            if process.environ().get("LOCAL_RANK") == str(rank):
                return process.pid
    raise ProcessLookupError(f"no rank {rank}")


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    return False
