"""The program ``compile_cpu_adam.py PID``: compiles DeepSpeed's CPU Adam, and ends with the process PID.

It runs in a session of its own. ninja puts compilers into process groups of their own, and passes SIGTERM on to them.
"""

import os
import signal
import sys
import threading
import time

from deepspeed.ops.op_builder import CPUAdamBuilder


def end_with(parent: int) -> None:
    """End this process and its compilers once the process ``parent`` is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    parent = int(sys.argv[1])
    threading.Thread(target=end_with, args=[parent], daemon=True).start()
    CPUAdamBuilder().load()
