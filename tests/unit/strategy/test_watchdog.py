"""The watchdog ends a process that cannot continue, even if nobody reads why, and no other."""

import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest

from openppo.config import RunConfig
from openppo.strategy import signals
from openppo.strategy.heartbeats import Heartbeat
from openppo.strategy.watchdog import Watchdog
from openppo.tracking.phase import CurrentPhase

START = """
import sys, time
from openppo.config import RunConfig
from openppo.strategy import fault_report
from openppo.strategy.watchdog import Watchdog
from openppo.tracking.phase import current, phase

def look_failed(*_):
    raise OSError(24, "Too many open files")
"""
STALLS = """
with Watchdog(RunConfig(stall_timeout=1), current, {}):
    for _ in range(30):
        with phase("training"):
            time.sleep(0.1)
    print("went on", flush=True)
    time.sleep(300)
"""
FAILS_FOR_A_MOMENT = """
memory = fault_report.host_memory
fault_report.host_memory = look_failed
with Watchdog(RunConfig(heartbeat_timeout=5), current, {}):
    time.sleep(1)
    fault_report.host_memory = memory
    time.sleep(6)
"""
CANNOT_REPORT = """
with Watchdog(RunConfig(), current, {}) as watchdog:
    watchdog.explain_memory_with(look_failed)
    raise MemoryError("of the user")
"""
CASES = {
    "stalls after progress": (
        STALLS,
        1,
        r"went on\n(Current t|T)hread 0x[^=]*=+ OpenPPO: [\s\S]*rank 0 made no progress for [1-9]\S* s",
    ),
    "look fails for a moment": (FAILS_FOR_A_MOMENT, 0, r"OSError: .* Too many open files\n$"),
    "cannot report": (CANNOT_REPORT, 1, r"MemoryError: of the user[\s\S]*Too many open files"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lone_process_ends_with_what_is_known(case, launcher):
    program, status, says = CASES[case]
    done = launcher.run(["-c", START + program], timeout=120)
    assert done.returncode == status, done.stdout
    assert re.search(says, done.stdout), done.stdout


WAITS = f"""{START}
with Watchdog(RunConfig(), current, {{}}):
    print("waits", flush=True)
    time.sleep(300)
"""


def test_a_log_that_nobody_reads_keeps_no_process_alive():
    words = ["timeout", "60", sys.executable, "-c", WAITS]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "waits\n"
        process.stdout.close()
        process.stderr.close()
        process.terminate()  # which ``timeout`` passes on
        assert process.wait(timeout=100) == 128 + 15


FAILS = f"""{START}
print("kept in the buffer")
with Watchdog(RunConfig(), current, {{}}):
    raise RuntimeError("of the user")
"""


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full", "| cat"])
def test_a_failure_is_reported_whatever_stdout_is(stdout):
    shell = f'set -o pipefail; unset PYTHONUNBUFFERED; "$0" -c "$1" {stdout}'
    words = ["bash", "-c", shell, sys.executable, FAILS]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "fault:   rank 0 raised RuntimeError: of the user" in ended.stderr
    assert "Exception in thread" not in ended.stderr
    assert ended.stdout == ("kept in the buffer\n" if stdout == "| cat" else "")


@pytest.mark.parametrize(
    ("phase", "idle", "other_phase", "other_idle", "stalled"),
    [
        ("generation", 60, "loading", 60, False),
        ("generation", 60, "generation", 60, True),
        ("loading", 60, "generation", 60, False),
        ("generation", 1e4, "loading", 1e4, False),  # the other rank is reported
        ("loading", 1e4, "loading", 1e4, True),
    ],
)
def test_a_rank_that_waits_for_a_large_model_has_not_stalled(
    phase, idle, other_phase, other_idle, stalled
):
    mine = Heartbeat(rank=0, phase=phase, step=1, idle=idle)
    watchdog = Watchdog(RunConfig(stall_timeout=5), CurrentPhase(), {})
    watchdog._store.beats[1] = replace(
        mine, rank=1, samples=True, phase=other_phase, idle=other_idle
    )
    assert watchdog._is_stalled(mine) == stalled


def test_a_store_is_gone_when_it_fails_twice_in_a_row(monkeypatch):
    """Its host may be on the way out, and is found by the second look."""
    watchdog = Watchdog(RunConfig(), CurrentPhase(), {})
    reported: list[str] = []
    monkeypatch.setattr(watchdog, "_report", lambda fault: reported.append(fault.message))
    monkeypatch.setattr(signals, "receive", lambda seconds: [])

    errors = iter(["Broken pipe", None, "Broken pipe", "Broken pipe"])
    monkeypatch.setattr(watchdog._store, "_send_and_receive", lambda *_: next_error(errors))
    monkeypatch.setattr(watchdog._store, "_client", Mock())
    counts = []
    for _ in range(4):
        watchdog._check()
        counts.append(len(reported))
    assert counts == [0, 0, 0, 1]
    assert reported == [
        "rank 0, which hosts the store of the ranks, is gone or out of reach (Broken pipe)"
    ]


def next_error(errors):
    """Raise as torch's store does, unless the next error is None."""
    error = next(errors)
    if error is not None:
        raise RuntimeError(error)
