"""The program ``compile_cpu_adam.py PID``: compiles DeepSpeed's CPU Adam, and ends with the process PID.

Its session is its own. ninja puts compilers into groups of their own, and passes SIGTERM on to them.
"""

import os
import signal
import sys
import threading
import time

from deepspeed.ops.op_builder import CPUAdamBuilder


def end_with(run: int) -> None:
    """End this process and its compilers once its parent ``run`` is gone."""
    while os.getppid() == run:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with, args=[int(sys.argv[1])], daemon=True).start()
    CPUAdamBuilder().load()
