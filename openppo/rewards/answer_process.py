"""Work in a separate process with a time limit.

math-verify bounds its time by signals, which reach main threads only; nothing but a kill ends a regular expression
that backtracks for ever, during which no other thread runs. Questions and answers are pickled. A pool of
``concurrent.futures`` would import the run's main module again, which may be a script that trains.
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
        """Whether an answer came within ``seconds``, without a crash, and the answer."""
        asked = pickle.dumps(question)
        if (
            self.process is None or self.process.poll() is not None
        ):  # killed between two questions, for memory perhaps
            self.process = self._start()
        process, self.was_late = self.process, False
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(
            threading.TIMEOUT_MAX if seconds is None else seconds, self._kill, [process]
        )
        alarm.daemon = True
        alarm.start()
        try:
            process.stdin.write(asked)
            process.stdin.flush()
            return True, read(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            process_groups.kill(process.pid)
            process.wait()
            return False, None
        finally:
            alarm.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # -P: http.py beside this file is not the library's; -u: what a function prints appears at once
            [sys.executable, "-Pu", _PROGRAM, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for the run; the process ends when its stdin does
        )
        process_groups.add(process.pid)
        weakref.finalize(process, process_groups.kill, process.pid).atexit = False
        assert process.stdout is not None
        try:
            read(process.stdout)  # it is ready
        except EOFError:
            status = process.wait()
            raise RuntimeError(
                f"{self.flag}: its process ended with status {status}; see above."
            ) from None
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self.was_late = True
        process_groups.kill(process.pid)  # and what it has started


class RaisedThere(Exception):  # noqa: N818 (whatever it was)
    """What a function raised in its process: its repr, and the traceback there as a note."""

    def __repr__(self) -> str:
        return str(self)


class FunctionProcesses:
    """A function of a file in ``n`` processes, which load it once each; a call waits for a free one.

    ``seconds`` are those of a sample. ``flag`` names the function in messages.
    """

    def __init__(self, flag: str, file: str, name: str, n: int, seconds: float | None) -> None:
        self.n, self.seconds = n, seconds
        self._free = SimpleQueue[AnswerProcess]()
        for _ in range(n):
            started = "function", file, name, os.pathsep.join(sys.path)
            self._free.put(AnswerProcess(flag, *started, environment=_with_own_gpu()))

    def __call__(self, arguments: dict[str, Any], n_samples: int) -> Any:
        """The function's result; ``TimeoutError``, ``ChildProcessError`` or ``RaisedThere`` without one."""
        process = self._free.get()
        try:
            in_time, answer = process.ask(
                arguments, None if self.seconds is None else n_samples * self.seconds
            )
            was_late, status = process.was_late, process.process and process.process.returncode
        finally:
            self._free.put(process)
        if was_late and not in_time:
            raise TimeoutError(f"no result within --reward_timeout {self.seconds:g} s a sample")
        if not in_time:
            raise ChildProcessError(f"its process ended with status {status}")
        if isinstance(answer, bytes):
            return pickle.loads(answer)  # noqa: S301 (of the same function in this process)
        error = RaisedThere(answer[0])
        error.add_note(answer[1])
        raise error


def _with_own_gpu() -> dict[str, str]:
    """This process's environment, in which "cuda" is the GPU of this rank."""
    import torch  # not in the process itself, which may do without

    environment = dict(os.environ)
    if torch.cuda.is_available():
        visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(torch.cuda.device_count()))
        )
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[torch.cuda.current_device()]
    return environment
