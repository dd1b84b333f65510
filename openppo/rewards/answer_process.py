"""Work in a separate process with a time limit.

``answer_process.py math`` compares answers, ``answer_process.py regex PATTERN`` searches for matches.

math-verify bounds its time by signals, which reach main threads only; nothing but a kill ends a regular expression
that backtracks for ever, during which no other thread runs. Questions and answers are lines of JSON. A pool of
``concurrent.futures`` would import the run's main module again, which may be a script that trains.
"""

import json
import logging
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_READY = "ready"
_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


class AnswerProcess:
    """A process that answers each question in turn, restarted when needed.

    ``arguments`` are those of this module. ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(self, flag: str, *arguments: str) -> None:
        self.flag = flag
        self.arguments = arguments
        self.process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, seconds: float) -> tuple[bool, Any]:
        """Whether an answer came within ``seconds``, without a crash, and the answer."""
        if self.process is None or self.process.poll() is not None:  # killed between two questions, for memory perhaps
            self.process = self._start()
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        answer = process.stdout.readline()
        alarm.cancel()
        if answer:
            return True, json.loads(answer)
        process.communicate()
        return False, None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, *self.arguments],  # -P: http.py beside this file is not the library's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run; the process ends when its stdin does
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != _READY:
            raise RuntimeError(f"{self.flag}: its process ended with status {process.wait()}; see above.")
        return process


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


def main(kind: str, *arguments: str) -> None:
    """Answer lines until stdin is closed."""
    answer: Callable[[Any], Any] = partial(last_match, re.compile(arguments[0])) if kind == "regex" else is_equal
    logging.disable(logging.CRITICAL)  # math-verify logs each answer that takes too long
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if kind == "math":
        import math_verify  # noqa: F401 (its seconds are not the first answer's)
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
