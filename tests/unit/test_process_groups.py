"""Process groups end with the process that has started them, however that ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from openppo.process_groups import RELEASE, ProcessGroups, held
from tests.fork_server import REPO

STARTS = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from openppo.process_groups import RELEASE, bound, held, process_groups

def start():
    process = subprocess.Popen(held("sh", "-c", FAMILY), stdin=subprocess.PIPE, start_new_session=True)
    process_groups.add(process.pid)
    process.stdin.write(RELEASE)
    process.stdin.flush()
    return process

"""
FAMILY = """sh -c 'trap "" TERM HUP INT; sleep 1000 & echo $PPID $$ $!; wait' & wait"""
"""A program with a child and a grandchild; it prints their ids."""


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never came true")


class Run:
    """A process that starts programs, and the processes of these."""

    def __init__(self, lines: str) -> None:
        program = f"FAMILY = {FAMILY!r}\n{STARTS}{lines}"
        environment = os.environ | {"PYTHONPATH": str(REPO)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, text=True, **pipes
        )
        assert self.process.stdout is not None
        self.programs = [int(pid) for pid in self.process.stdout.readline().split()]

    def guardian(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (guardian,) = [
            child for child in children if child.cmdline()[-1].endswith("process_groups.py")
        ]
        return guardian

    def leaves_nothing(self) -> None:
        self.process.wait()
        until(lambda: not any(map(is_alive, self.programs)))
        assert self.process.stdout is not None
        assert self.process.stdout.read() == "", "who reads the output waits for nobody"


@pytest.fixture
def start() -> Iterator[Callable[[str], Run]]:
    """Starts a run of these lines, which is killed after the test."""
    with ExitStack() as stack:

        def run(lines: str) -> Run:
            started = Run(lines)
            stack.callback(started.process.kill)
            return started

        yield run


@pytest.mark.parametrize(
    "lines",
    [
        "start(); time.sleep(1); os._exit(1)",
        "start(); time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)",
        "start(); time.sleep(1); os.killpg(0, signal.SIGKILL)",
        "start(); time.sleep(1)",
        "subprocess.Popen(bound('sh', '-c', FAMILY)); time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_group_ends_with_its_starter(start, lines):
    run = start(lines)
    assert len(run.programs) == 3
    run.leaves_nothing()


def test_a_group_outlives_the_thread_that_started_it(start):
    run = start("threading.Thread(target=start).start(); time.sleep(1000)")
    time.sleep(1.5)
    assert all(map(is_alive, run.programs))
    run.process.kill()
    run.leaves_nothing()


def test_a_fork_that_lives_on_keeps_no_group_alive(start):
    forks = "fork = multiprocessing.get_context('fork').Process(target=time.sleep, args=[60])"
    run = start(f"start(); os.dup2(2, 1); {forks}; fork.start(); time.sleep(1000)")
    until(lambda: len(psutil.Process(run.process.pid).children()) == 3)
    children = psutil.Process(run.process.pid).children()
    (fork,) = [child for child in children if child.cmdline()[:2] == [sys.executable, "-c"]]
    run.process.kill()
    run.leaves_nothing()
    assert fork.is_running()
    fork.kill()


def test_signals_of_a_job_manager_do_not_end_the_guardian(start):
    run = start("start(); time.sleep(1000)")
    until(lambda: signal.SIGTERM in ignored(run.guardian()))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        run.guardian().send_signal(number)
    run.process.kill()
    run.leaves_nothing()


def ignored(process: psutil.Process) -> set[int]:
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], base=16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def test_a_new_guardian_knows_the_groups_of_one_that_was_killed(start):
    kills = "process_groups._guardian.kill(); process_groups._guardian.wait()"
    run = start(f"start(); {kills}; FAMILY = 'sleep 1; echo again'; start(); time.sleep(1000)")
    assert run.process.stdout.readline() == "again\n"
    run.process.kill()
    run.leaves_nothing()


def test_a_command_does_not_start_before_its_group_is_known(tmp_path):
    command = held("touch", str(tmp_path / "started"))
    assert subprocess.run(command, input=b"").returncode != 0
    assert not (tmp_path / "started").exists()
    assert subprocess.run(command, input=RELEASE).returncode == 0
    assert (tmp_path / "started").exists()


def test_all_groups_are_killed_at_once_before_an_exit():
    groups = ProcessGroups()
    processes = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(3)]
    for process in processes:
        groups.add(process.pid)
    groups.kill_all()
    assert [process.wait() for process in processes] == [-signal.SIGKILL] * 3
    groups.leave_to_parent()


def test_a_group_is_killed_by_its_owner_alone():
    groups = ProcessGroups()
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    groups.kill(process.pid)
    assert process.poll() is None
    groups.add(process.pid)
    groups.kill(process.pid)
    assert process.wait() == -signal.SIGKILL
    groups.leave_to_parent()
