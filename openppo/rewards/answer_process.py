"""Work in a separate process with a time limit.

``python -m openppo.rewards.answer_process math`` compares answers, ``regex PATTERN`` looks for matches.

math-verify bounds its time by signals, which reach main threads only; nothing but a kill ends a regular expression
that backtracks for ever, during which no other thread runs. Questions and answers are lines of JSON.
"""

import json
import logging
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_READY = "ready"
_SECONDS = 2
_MEMORY_BYTES = 4 * 2**30


class AnswerProcess:
    """A process that answers each question in turn, restarted when needed.

    ``arguments`` are those of this module. ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(self, arguments: Sequence[str], flag: str) -> None:
        self.arguments = arguments
        self.flag = flag
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Any, seconds: float) -> tuple[bool, Any]:
        """Whether an answer came within ``seconds``, without a crash, and the answer."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None  # killed between two questions, for memory perhaps
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        answer = process.stdout.readline().strip()
        alarm.cancel()
        if answer != "":
            return True, json.loads(answer)
        process.communicate()
        self._process = None
        return False, None

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "openppo.rewards.answer_process", *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the run; the process ends when its stdin does
        )
        assert process.stdout is not None
        if process.stdout.readline().strip() != _READY:
            raise RuntimeError(f"{self.flag}: its process ended with status {process.wait()}; see above.")
        return process


def last_match(pattern: str) -> Callable[[str], str | None]:
    """Function from a text to its last match of ``pattern``, or the group in it; None without a match."""
    compiled = re.compile(pattern)

    def answer(text: str) -> str | None:
        found = None
        for match in compiled.finditer(text):
            found = match[compiled.groups] or ""
        return found

    return answer


def compare_answers() -> Callable[[Any], bool | None]:
    """Function from (label, readings) to whether a reading equals the label; None for a label without mathematics.

    math-verify is an optional package.
    """
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # it logs each answer that takes too long
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def answer(question: Any) -> bool | None:
        label, readings = question
        gold = parse(label, parsing_timeout=_SECONDS)
        if not gold:
            return None
        read = (parse(reading, parsing_timeout=_SECONDS) for reading in readings)
        return any(verify(gold, found, timeout_seconds=_SECONDS) for found in read)

    return answer


def main(kind: str, *arguments: str) -> None:
    """Answer lines until stdin is closed."""
    answer: Callable[[Any], Any] = last_match(*arguments) if kind == "regex" else compare_answers()
    sys.stdout.write(_READY + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
