"""The watch ends a process that cannot go on, even if nobody is there to be told why, and no other."""

from __future__ import annotations

import re
import subprocess
import sys

START = """
import time
from openppo.config import RunConfig
from openppo.strategy.watch import Watch
from openppo.tracking.position import phase, position
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


def test_one_rank_is_ended_when_it_stalls_and_not_while_it_goes_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", GOES_ON_AND_STALLS], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "went on\n", ended.stderr
    assert ended.returncode == 1
    stalled = re.search(r"rank 0 made no progress for (\S+) s", ended.stderr)
    assert stalled is not None, ended.stderr
    assert float(stalled[1]) >= 1
