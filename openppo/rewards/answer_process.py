"""Work in a separate process with a time limit.

math-verify limits its time by signals, which reach only main threads. A regular expression may backtrack for ever;
then no other thread runs, and only a kill ends it. Workers of ``concurrent.futures`` and pebble import the run's main
module again, which may be a training script; those of loky outlive a run that is killed.
"""

import os
import pickle
import subprocess
import sys
import weakref
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from openppo.process_groups import process_groups

_PROGRAM = Path(__file__).with_name("answer_program.py")
_LONGEST_WAIT = 1e6  # seconds; ``poll`` of the system takes no more than 2.1e6


class AnswerProcess:
    """A process that answers each question in turn, restarted when needed.

    ``arguments`` are those of ``answer_program.py``. ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(self, flag: str, *arguments: str) -> None:
        self.flag = flag
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Any, seconds: float | None) -> Any:
        """Return the answer; ``TimeoutError``, ``ChildProcessError`` or ``RaisedThere`` if there is none."""
        request = pickle.dumps(question)
        process = self.process
        if process is None or process.poll() is not None:
            # This is the first question, or the process was killed since the last one, perhaps for memory.
            process = self.process = self._start()

        limit = None if seconds is None else min(seconds, _LONGEST_WAIT)
        try:
            self.pipe.send_bytes(request)
            if not self.pipe.poll(limit):
                raise TimeoutError(f"no answer within {seconds:g} s")
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError) as lost:
            process_groups.kill(process.pid)  # with all that it has started
            status = process.wait()
            if isinstance(lost, TimeoutError):
                raise
            raise ChildProcessError(f"its process ended with status {status}") from None

        result, failure = pickle.loads(answer)  # noqa: S301 (from our own program)
        if failure is not None:
            text, traceback = failure
            error = RaisedThere(text)
            error.add_note(traceback)
            raise error
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it is ready."""
        self.pipe, far_end = Pipe()
        with far_end:
            descriptor = far_end.fileno()
            # -P: http.py beside this file is not the library's; -u: output of a function appears at once.
            command = [sys.executable, "-Pu", str(_PROGRAM), str(descriptor), *self.arguments]
            process = subprocess.Popen(
                command,
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
            status = process.wait()
            raise RuntimeError(
                f"{self.flag}: its process ended with status {status}; see above."
            ) from None
        return process


class RaisedThere(Exception):  # noqa: N818 (whatever it was)
    """Exception of a function in its process: its repr, and the traceback there as a note."""

    def __repr__(self) -> str:
        return str(self)


class FunctionProcesses:
    """A function of a file, loaded once by each of ``n`` processes; a call waits for a free process.

    ``seconds`` limit the time of a sample. ``flag`` names the function in messages.
    """

    def __init__(self, flag: str, file: str, name: str, n: int, seconds: float | None) -> None:
        self.n = n
        self.seconds = seconds
        self._free = SimpleQueue[AnswerProcess]()
        folders = os.pathsep.join(sys.path)
        for _ in range(n):
            self._free.put(AnswerProcess(flag, "function", file, name, folders))

    def __call__(self, arguments: dict[str, Any], n_samples: int) -> Any:
        """Return the result of the function, or raise as ``AnswerProcess.ask`` does."""
        seconds = None if self.seconds is None else n_samples * self.seconds
        process = self._free.get()
        try:
            return process.ask(arguments, seconds)
        except TimeoutError:
            message = f"no result within --reward_timeout {self.seconds:g} s a sample"
            raise TimeoutError(message) from None
        finally:
            self._free.put(process)


def _with_own_gpu() -> dict[str, str]:
    """Environment of this process, in which "cuda" is the GPU of this rank."""
    import torch  # only here: the process itself may not need it

    environment = dict(os.environ)
    if torch.cuda.is_available():
        all_devices = ",".join(map(str, range(torch.cuda.device_count())))
        visible = environment.get("CUDA_VISIBLE_DEVICES") or all_devices
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[torch.cuda.current_device()]
    return environment
