"""Work in a separate process with a time limit.

math-verify limits its time by signals, which reach only main threads. A regular expression may backtrack for ever;
then no other thread runs, and only a kill ends it. Questions and answers are pickled. A pool of
``concurrent.futures`` would import the run's main module again, which may be a training script.
"""

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from openppo.process_groups import process_groups
from openppo.rewards.answer_program import read

_PROGRAM = Path(__file__).with_name("answer_program.py")


class AnswerProcess:
    """A process that answers each question in turn, restarted when needed.

    ``arguments`` are those of ``answer_program.py``. ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(
        self, flag: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.flag = flag
        self.arguments = arguments
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.was_late = False

    def ask(self, question: Any, seconds: float | None) -> tuple[bool, Any]:
        """Return True and the answer, or False if none came within ``seconds`` or the process ended."""
        request = pickle.dumps(question)
        process = self.process
        if process is None or process.poll() is not None:
            # This is the first question, or the process was killed since the last one, perhaps for memory.
            process = self.process = self._start()
        assert process.stdin is not None and process.stdout is not None

        self.was_late = False
        limit = threading.TIMEOUT_MAX if seconds is None else seconds
        alarm = threading.Timer(limit, self._kill, [process])
        alarm.daemon = True
        alarm.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return True, read(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            process_groups.kill(process.pid)
            process.wait()
            return False, None
        finally:
            alarm.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process and wait until it is ready."""
        # -P: http.py beside this file is not the library's; -u: output of a function appears at once.
        command = [sys.executable, "-Pu", str(_PROGRAM), *self.arguments]
        # In a session of its own, Ctrl-C does not reach the process; it ends when its stdin does.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
        )
        process_groups.add(process.pid)
        weakref.finalize(process, process_groups.kill, process.pid).atexit = False
        assert process.stdout is not None
        try:
            read(process.stdout)
        except EOFError:
            status = process.wait()
            raise RuntimeError(
                f"{self.flag}: its process ended with status {status}; see above."
            ) from None
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a process that is late, and all processes that it has started."""
        self.was_late = True
        process_groups.kill(process.pid)


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
        environment = _with_own_gpu()
        for _ in range(n):
            process = AnswerProcess(flag, "function", file, name, folders, environment=environment)
            self._free.put(process)

    def __call__(self, arguments: dict[str, Any], n_samples: int) -> Any:
        """Result of the function; ``TimeoutError``, ``ChildProcessError`` or ``RaisedThere`` if there is none."""
        seconds = None if self.seconds is None else n_samples * self.seconds
        process = self._free.get()
        try:
            has_answered, answer = process.ask(arguments, seconds)
            was_late = process.was_late
            status = None if process.process is None else process.process.returncode
        finally:
            self._free.put(process)

        if not has_answered:
            if was_late:
                raise TimeoutError(f"no result within --reward_timeout {self.seconds:g} s a sample")
            raise ChildProcessError(f"its process ended with status {status}")
        if isinstance(answer, bytes):
            return pickle.loads(answer)  # noqa: S301 (from the same function)

        text, traceback = answer
        error = RaisedThere(text)
        error.add_note(traceback)
        raise error


def _with_own_gpu() -> dict[str, str]:
    """Environment of this process, in which "cuda" is the GPU of this rank."""
    import torch  # only here: the process itself may not need it

    environment = dict(os.environ)
    if torch.cuda.is_available():
        all_devices = ",".join(map(str, range(torch.cuda.device_count())))
        visible = environment.get("CUDA_VISIBLE_DEVICES") or all_devices
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[torch.cuda.current_device()]
    return environment
