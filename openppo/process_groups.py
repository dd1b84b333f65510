"""Process groups that end with this process, however it ends: ``os._exit``, kill -9, a crash in C.

    process = subprocess.Popen(held(*command), stdin=subprocess.PIPE, start_new_session=True)
    process_groups.add(process.pid)
    process.stdin.write(RELEASE)  # the command starts
    ...
    process_groups.kill(process.pid)

A guardian, which is this file as a program, reads the groups from a pipe and kills them once the pipe is closed. A
parent-death signal reaches no grandchildren, depends on the thread that started the child, and is not on macOS.
``process_groups.py PID COMMAND`` is for one command that others start: it ends with the process PID.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

HOLD = "read -r _ || exit; "
"""Start of a shell script that waits until its group is known here, and ends if this process ends before.

asyncio starts a process in several passes of its loop; one that is cancelled between them must have started nothing.
"""
RELEASE = b"\n"
_GRACE = 1.0
"""Seconds for programs that end by themselves, since their stdin has closed, too."""


def held(*command: str) -> list[str]:
    """Wrap a command: it starts when ``RELEASE`` comes on stdin, and never if stdin is closed before."""
    return ["/bin/sh", "-c", f'{HOLD}exec "$@"', "sh", *command]


def bound(*command: str) -> list[str]:
    """Wrap a command that a library starts in a session of its own: its group ends with this process."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


class ProcessGroups:
    """Groups, by the ids of their first processes, that do not outlive this process."""

    def __init__(self) -> None:
        self._groups = set[int]()
        self._lock = threading.RLock()  # a finalizer may kill a group at any moment
        self._guardian: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Kill the group when this process ends."""
        with self._lock:
            self._groups.add(group)
            self._tell()

    def kill(self, group: int) -> None:
        """Kill what is left of the group now; without effect a second time, and in a fork."""
        with self._lock:
            if group in self._groups:
                _kill(group)
                self._groups.discard(group)
                self._tell()

    def kill_all(self) -> None:
        """Kill all groups, for a process that is about to end; waits for no lock."""
        for group in list(self._groups):
            _kill(group)

    def leave_to_parent(self) -> None:
        """Start without groups, in a fork; the pipe is the parent's alone."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()
        self._guardian = None
        self._groups = set()
        self._lock = threading.RLock()  # another thread may have held it

    def _tell(self) -> None:
        """Send all groups each time, so that a new guardian learns those of one that was killed."""
        if self._guardian is None or self._guardian.poll() is not None:
            self._guardian = _start_guardian()
        assert self._guardian.stdin is not None

        groups = " ".join(map(str, list(self._groups)))
        self._guardian.stdin.write(f"{groups}\n".encode())
        self._guardian.stdin.flush()


def _start_guardian() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-IS", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a reader of this process's output would wait for the guardian
        cwd="/",
        start_new_session=True,  # signals to the group of this process do not reach the guardian
    )


def _kill(group: int) -> None:
    # On macOS PermissionError means that only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def guard() -> None:
    """Kill the groups of the last whole line of stdin, when that is closed."""
    # Slurm sends its signals to all processes.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    groups = ""
    for line in sys.stdin:
        if line.endswith("\n"):
            groups = line
    time.sleep(_GRACE)
    for group in groups.split():
        _kill(int(group))


def run_bound(run: int, command: list[str]) -> None:
    """Run a command in a group that is killed as soon as the process ``run`` or the command has ended."""
    with suppress(PermissionError):  # this process began a session, and has a group of its own
        os.setpgid(0, 0)
    process = subprocess.Popen(command)
    while os.getppid() == run and process.poll() is None:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


process_groups = ProcessGroups()
os.register_at_fork(after_in_child=process_groups.leave_to_parent)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_bound(int(sys.argv[1]), sys.argv[2:])
    else:
        guard()
