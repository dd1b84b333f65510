"""Work in a separate process with a time limit.

``answer_process.py math`` compares answers, ``answer_process.py regex PATTERN`` searches for matches, and
``answer_process.py function FILE NAME PATH`` calls a function of users, with the folders of PATH to import from.

math-verify bounds its time by signals, which reach main threads only; nothing but a kill ends a regular expression
that backtracks for ever, during which no other thread runs. Questions and answers are pickled. A pool of
``concurrent.futures`` would import the run's main module again, which may be a script that trains.
"""

import logging
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


class AnswerProcess:
    """A process that answers each question in turn, restarted when needed.

    ``arguments`` are those of this module. ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(self, flag: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.flag, self.arguments, self.environment = flag, arguments, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.was_late = False

    def ask(self, question: Any, seconds: float | None) -> tuple[bool, Any]:
        """Whether an answer came within ``seconds``, without a crash, and the answer."""
        asked = pickle.dumps(question)
        if self.process is None or self.process.poll() is not None:  # killed between two questions, for memory perhaps
            self.process = self._start()
        process, self.was_late = self.process, False
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, self._kill, [process])
        alarm.daemon = True
        alarm.start()
        try:
            process.stdin.write(asked)
            process.stdin.flush()
            return True, read(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            process.kill()
            process.wait()
            return False, None
        finally:
            alarm.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # -P: http.py beside this file is not the library's; -u: what a function prints appears at once
            [sys.executable, "-Pu", __file__, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,  # Ctrl-C is for the run; the process ends when its stdin does
        )
        assert process.stdout is not None
        try:
            read(process.stdout)  # it is ready
        except EOFError:
            status = process.wait()
            raise RuntimeError(f"{self.flag}: its process ended with status {status}; see above.") from None
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self.was_late = True
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started


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
            in_time, answer = process.ask(arguments, None if self.seconds is None else n_samples * self.seconds)
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
        visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[torch.cuda.current_device()]
    return environment


def read(file: IO[bytes]) -> Any:
    """What the other process wrote next; ``EOFError`` if that has ended."""
    return pickle.load(file)  # noqa: S301 (both are this program)


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """The last match of ``pattern`` in ``text``, or the group in it; None without a match."""
    found = None
    for match in pattern.finditer(text):
        found = match[pattern.groups] or ""
    return found


def is_equal(question: tuple[str, list[str]]) -> bool | None:
    """Whether one of the readings equals the label (both in ``question``); None for a label without mathematics."""
    from math_verify import parse, verify

    label, readings = question
    gold = parse(label, parsing_timeout=_SECONDS)
    if not gold:
        return None
    read = (parse(reading, parsing_timeout=_SECONDS) for reading in readings)
    return any(verify(gold, found, timeout_seconds=_SECONDS) for found in read)


def load_function(file: str, name: str, path: str) -> Callable[..., Any]:
    """The function ``name`` of ``file``, which imports from the folders of ``path``."""
    sys.path[:] = path.split(os.pathsep)
    spec = spec_from_file_location(f"reward_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def call_function(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes | tuple[str, str]:
    """Its pickled result, or repr and traceback of what it raised."""
    try:
        result = function(**arguments)
        return pickle.dumps(list(result) if isinstance(result, Iterator) else result)
    except BaseException as error:  # noqa: BLE001 (raised again where the answer is read)
        return repr(error), "".join(traceback.format_exception(error))


def end_with(run: int) -> None:
    """Kill this process and what it has started once ``run`` is gone: a function may never return."""
    while os.getppid() == run:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main(kind: str, *arguments: str) -> None:
    """Answer questions until stdin is closed."""
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a function prints is no answer
    answer: Callable[[Any], Any]
    if kind == "function":
        answer = partial(call_function, load_function(*arguments))
    else:
        answer = partial(last_match, re.compile(arguments[0])) if kind == "regex" else is_equal
        logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if kind == "math":
        import math_verify  # noqa: F401 (its seconds are not the first answer's)
    with suppress(EOFError):
        send = None
        while True:
            pickle.dump(send, answers)
            answers.flush()
            send = answer(read(questions))


if __name__ == "__main__":
    main(*sys.argv[1:])
