"""Work in a separate process with a time limit."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence

READY = "ready\n"
"""What such a process writes first."""


class LineProcess:
    """Process that answers each line with a line, restarted when needed.

    ``RuntimeError`` naming ``flag`` if it cannot start.
    """

    def __init__(self, command: Sequence[str], flag: str, env: Mapping[str, str] | None = None) -> None:
        self.command = command
        self.flag = flag
        self.env = env
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: str, seconds: float) -> str | None:
        """Answer to a line; None after ``seconds`` or a crash."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None  # killed between two questions, for memory perhaps
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(question + "\n")
        process.stdin.flush()
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        answer = process.stdout.readline().strip()
        alarm.cancel()
        if answer != "":
            return answer
        process.communicate()
        self._process = None
        return None

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
            start_new_session=True,  # Ctrl-C is for us; the process ends when its stdin does
        )
        assert process.stdout is not None
        if process.stdout.readline() != READY:
            raise RuntimeError(f"{self.flag}: its process ended with status {process.wait()}; see above.")
        return process
