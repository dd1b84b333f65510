"""Functions of files in processes of their own, with a limit of time for each call.

math-verify limits its time by signals, which reach only main threads, and a user's function may never return. Workers
of ``concurrent.futures`` and pebble import the run's main module again, which may be a training script; those of loky
outlive a run that is killed.
"""

import math
import os
import pickle
import subprocess
import sys
import weakref
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from openppo.process_groups import process_groups

_PROGRAM = Path(__file__).with_name("function_program.py")
_LONGEST_WAIT = 1e6
"""Seconds; ``poll`` of the system takes no more than 2.1e6."""


class FunctionProcess:
    """Process of the function ``name`` of ``file``, started with the first call and again after it was lost.

    ``flag`` names the function in the ``RuntimeError`` of a process that cannot start.
    """

    def __init__(self, flag: str, file: Path, name: str) -> None:
        self.flag = flag
        self.command = [str(file.resolve()), name, os.pathsep.join(sys.path)]
        self.process: subprocess.Popen[bytes] | None = None

    def call(self, arguments: dict[str, Any], seconds: float = math.inf) -> Any:
        """Return the result; ``TimeoutError``, ``ChildProcessError`` or ``RaisedThere`` if there is none."""
        request = pickle.dumps(arguments)
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()

        try:
            self.pipe.send_bytes(request)
            if not self.pipe.poll(min(seconds, _LONGEST_WAIT)):
                raise TimeoutError(f"no result within {seconds:g} s")
            result, failure = pickle.loads(self.pipe.recv_bytes())  # noqa: S301 (our own program)
        except (EOFError, OSError) as lost:
            process_groups.kill(self.process.pid)  # with all that it has started
            status = self.process.wait()
            if isinstance(lost, TimeoutError):
                raise
            raise ChildProcessError(f"its process ended with status {status}") from None

        if failure is not None:
            raise RaisedThere(*failure)
        return result

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process and wait until it has loaded the function."""
        self.pipe, far_end = Pipe()
        with far_end:
            descriptor = far_end.fileno()
            # -P: http.py beside this file is not the library's; -u: output of a function appears at once.
            process = subprocess.Popen(
                [sys.executable, "-Pu", str(_PROGRAM), str(descriptor), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_with_own_gpu(),
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C does not reach it; it ends when the pipe is closed
            )
        process_groups.add(process.pid)
        weakref.finalize(process, process_groups.kill, process.pid).atexit = False

        try:
            self.pipe.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError(
                f"{self.flag}: its process ended with status {process.wait()}; see above."
            ) from None
        return process


class RaisedThere(Exception):  # noqa: N818 (whatever it was)
    """Exception of a function in its process: its repr, and the traceback there as a note."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.add_note(traceback)

    def __repr__(self) -> str:
        return str(self)


def _with_own_gpu() -> dict[str, str]:
    """Environment of this process, in which "cuda" is the GPU of this rank."""
    import torch  # only here: the process itself may not need it

    if not torch.cuda.is_available():
        return dict(os.environ)
    all_devices = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or all_devices
    device = visible.split(",")[torch.cuda.current_device()]
    return os.environ | {"CUDA_VISIBLE_DEVICES": device}
