"""The watchdog ends a process that cannot continue, even if nobody reads why, and no other."""

import re
import subprocess
import sys

import pytest

from tests.fork_server import Launcher

START = """
import json, sys, time
from openppo.config import RunConfig
from openppo.strategy import fault_report, watchdog as module
from openppo.strategy.heartbeats import Heartbeat
from openppo.strategy.watchdog import Watchdog
from openppo.tracking.phase import current, phase

def look_failed():
    raise OSError(24, "Too many open files")
"""
STALLS = f"""{START}
with Watchdog(RunConfig(stall_timeout=1), current, {{}}):
    for _ in range(30):
        with phase("training"):
            time.sleep(0.1)
    print("went on", flush=True)
    time.sleep(300)
"""
FAILS_FOR_A_MOMENT = f"""{START}
memory = fault_report.host_memory
fault_report.host_memory = look_failed
with Watchdog(RunConfig(heartbeat_timeout=5), current, {{}}):
    time.sleep(1)
    fault_report.host_memory = lambda: json.loads("{{")
    time.sleep(1)
    fault_report.host_memory = memory
    time.sleep(6)
"""
OTHER_RANK = f"""{START}
class Store:
    beats, lost, status, error, is_hosted_here = {{1: Heartbeat(1, "training", 1, 0.0)}}, {{}}, None, None, True

    def exchange(self, mine):
        time.sleep(1.5 if self.status else 0)

    def kill_lost(self):
        pass

store, module._SECONDS_TO_END = Store(), 6
with Watchdog(RunConfig(heartbeat_timeout=5), current, {{}}) as watchdog:
    watchdog._store = store
"""
FINISHES_FIRST = f"""{OTHER_RANK}
print("left")
"""
IS_ENDED = f"""{OTHER_RANK}
    store.status = 3
    time.sleep(300)
"""
FAILS_FOR_LONG = f"""{START}
with Watchdog(RunConfig(heartbeat_timeout=5), current, {{}}):
    time.sleep(1)
    fault_report.host_memory = look_failed
    time.sleep(300)
"""
CANNOT_REPORT = f"""{START}
with Watchdog(RunConfig(), current, {{}}) as watchdog:
    watchdog.explain_memory = look_failed
    raise MemoryError("of the user")
"""
CANNOT_CLOSE = f"""{START}
from openppo.tracking import Trackers

class Slow:
    name, errors = "--use_slow", (OSError,)

    def close(self):
        print("closing", flush=True)
        time.sleep(300)

module._SECONDS_TO_CLOSE = 1
with Watchdog(RunConfig(), current, {{}}), Trackers([Slow()]):
    raise RuntimeError("of the user")
"""


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        (STALLS, 1, r"went on\n[^T]*=+ OpenPPO: [\s\S]*rank 0 made no progress for [1-9]\S* s"),
        (
            FAILS_FOR_A_MOMENT,
            0,
            r"files\nThe watchdog of rank 0 f[\s\S]*JSONDecodeError.*\nThe watchdog of rank 0",
        ),
        (FINISHES_FIRST, 0, r"^left\n"),
        (IS_ENDED, 3, r"^$"),
        (FAILS_FOR_LONG, 1, r"Too many open files[\s\S]*Timeout \(0:00:04"),
        (CANNOT_REPORT, 1, r"MemoryError: of the user[\s\S]*Too many open files"),
        (CANNOT_CLOSE, 1, r"closing\n[\s\S]*rank 0 raised RuntimeError: of the user"),
    ],
    ids=[
        "stalls after progress",
        "look fails for a moment",
        "finishes first",
        "another rank reports",
        "no file for long",
        "cannot report",
        "log cannot be closed",
    ],
)
def test_a_lone_process_ends_with_what_is_known(program: str, status: int, says: str, launcher: Launcher) -> None:
    done = launcher.run(["-c", program], timeout=120)
    assert done.returncode == status, done.stdout
    assert re.search(says, done.stdout), done.stdout


WAITS = f"""{START}
with Watchdog(RunConfig(), current, {{}}):
    print("waits", flush=True)
    time.sleep(300)
"""


def test_a_log_that_nobody_reads_keeps_no_process_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "waits\n"
            process.stdout.close()
            process.stderr.close()
            process.terminate()
            assert process.wait(timeout=60) == 128 + 15
        finally:
            process.kill()


FAILS = f"""{START}
print("kept in the buffer")
with Watchdog(RunConfig(), current, {{}}):
    raise RuntimeError("of the user")
"""


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full", "| cat"])
def test_a_failure_is_reported_whatever_stdout_is(stdout: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'set -o pipefail; unset PYTHONUNBUFFERED; "$0" -c "$1" {stdout}', sys.executable, FAILS],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "fault:   rank 0 raised RuntimeError: of the user" in ended.stderr
    assert "Exception in thread" not in ended.stderr
    assert ended.stdout == ("kept in the buffer\n" if stdout == "| cat" else "")
