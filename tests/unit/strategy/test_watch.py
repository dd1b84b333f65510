"""The watch ends a process that cannot go on, even if nobody is there to be told why."""

from __future__ import annotations

import subprocess
import sys

WAITS = """
import time
from openppo.config import RunConfig
from openppo.strategy.watch import Watch
from openppo.tracking.position import position
with Watch(RunConfig(), position, {}):
    print("waits", flush=True)
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
