"""The watch ends a process that cannot go on, even if nobody is there to be told why, and no other."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

START = """
import time
from openppo.config import RunConfig
from openppo.strategy.watch import Watch
from openppo.tracking.phase import phase, position
"""
WAITS = f"""{START}
with Watch(RunConfig(), position, {{}}):
    print("waits", flush=True)
    time.sleep(300)
"""
GOES_ON_AND_STALLS = f"""{START}
with Watch(RunConfig(stall_timeout=1), position, {{}}):
    for _ in range(30):
        with phase("training"):
            time.sleep(0.1)
    print("went on", flush=True)
    time.sleep(300)
"""
STUMBLES = f"""{START}
from openppo.strategy.watch import watch

def stumble(number):
    raise OSError(24, "Too many open files", str(number))

looks = watch.host_memory
watch._INTERVAL, watch._STUMBLES, times = 0.01, 20, int(__import__("sys").argv[1])
numbers = iter(range(times))
watch.host_memory = lambda: next((stumble(number) for number in numbers), None) or looks()
with Watch(RunConfig(), position, {{}}):
    time.sleep(100 if times > 20 else 1)
    assert next(numbers, None) is None
print("ended well", flush=True)
"""


def test_a_look_that_fails_ends_no_run_and_no_look_for_long_does() -> None:
    """No file or thread may be had for a moment."""
    for times, status in ((10, 0), (10**9, 1)):
        ended = subprocess.run(
            [sys.executable, "-c", STUMBLES, str(times)], capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == status, ended.stderr
        assert ended.stderr.count("could not look; it goes on") == 1
        assert ended.stderr.count("it ends the run") == status
        assert ended.stdout == ("ended well\n" if status == 0 else "")


CANNOT_REPORT = f"""{START}

def fail():
    raise RuntimeError("no memory to say so")

with Watch(RunConfig(), position, {{}}) as watch:
    watch.explain_memory = fail
    raise MemoryError("of the user")
"""


def test_an_error_that_cannot_be_reported_as_it_should_is_shown_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CANNOT_REPORT], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    assert "MemoryError: of the user" in ended.stderr
    assert "RuntimeError: no memory to say so" in ended.stderr


def test_a_log_that_nobody_reads_any_more_keeps_no_process_alive() -> None:
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
            assert process.wait(timeout=20) == 128 + 15
        finally:
            process.kill()


FAILS = f"""{START}
print("kept in the buffer")
with Watch(RunConfig(), position, {{}}):
    raise RuntimeError("of the user")
"""


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
def test_a_failure_is_reported_where_stdout_cannot_be_written(stdout: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f'unset PYTHONUNBUFFERED; exec "$0" -c "$1" {stdout}', sys.executable, FAILS],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "fault:   rank 0 raised RuntimeError: of the user" in ended.stderr
    assert "Exception in thread" not in ended.stderr


def test_one_rank_is_ended_when_it_stalls_and_not_while_it_goes_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", GOES_ON_AND_STALLS], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "went on\n", ended.stderr
    assert ended.returncode == 1
    stalled = re.search(r"rank 0 made no progress for (\S+) s", ended.stderr)
    assert stalled is not None, ended.stderr
    assert float(stalled[1]) >= 1


CANNOT_CLOSE = f"""{START}
from openppo.strategy.watch import watch
from openppo.tracking import Trackers

class Slow:
    name, errors = "--use_slow", (OSError,)

    def close(self):
        print("closing", flush=True)
        time.sleep(300)

watch._SECONDS_TO_CLOSE = 1
with Watch(RunConfig(), position, {{}}), Trackers([Slow()]):
    raise RuntimeError("of the user")
"""


def test_a_log_that_cannot_be_closed_does_not_hide_what_ended_the_run() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CANNOT_CLOSE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "closing\n")
    assert "RuntimeError: of the user" in ended.stderr
