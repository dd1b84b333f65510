"""A program that nobody changed, which talks to the gateway, as an agent."""

import asyncio
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from openppo.agents.episodes import Agent
from openppo.agents.gateway.server import Gateway
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import text_of
from openppo.types import Prompt

_COLUMN = re.compile(r"(?<!\$)\{([\w.-]+)\}")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_FOR_A_SHELL = re.compile(r"[|&;<>()$`*?\[~#\n]|^\s*\w+=")
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
_USUAL = set(
    "PATH HOME USER LOGNAME SHELL TERM TZ LANG LANGUAGE TMPDIR TEMP TMP VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY".split()
)
_USUAL_STARTS = ("LC_", "PYTHON", "XDG_")


class ProgramError(Exception):
    """A program that could not be started, or ended with an error."""


class Command:
    """A command line in which ``{column}`` stands for a row's value.

    It is split into words, and a value stays in its word whatever it is. Only a line with pipes, redirections,
    variables and the like outside of quotes is run by ``/bin/sh``, with quoted values.
    """

    def __init__(self, text: str) -> None:
        quoted = _QUOTED.findall(text)
        expanded = [part for part in quoted if part[0] == '"' and set("$`") & set(part)]
        self.text = text
        self.shell = bool(expanded or _FOR_A_SHELL.search(_QUOTED.sub("", text)))
        self.columns = set(_COLUMN.findall(text))
        try:
            self.words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"--agent_command {text}: {error}. Correct the quotes.") from error
        if self.shell and (inside := _COLUMN.search(" ".join(quoted))):
            raise ValueError(f"--agent_command: leave the quotes around {inside[0]} out; its value gets its own.")
        self._check_program()

    def arguments(self, row: Mapping[str, Any]) -> list[str]:
        """What is executed for ``row``: texts as they are, other values as JSON."""

        def value(match: re.Match[str]) -> str:
            given = row[match[1]]
            text = given if isinstance(given, str) else json.dumps(given, default=str)
            return shlex.quote(text) if self.shell else text

        if self.shell:
            return ["/bin/sh", "-c", _COLUMN.sub(value, self.text)]
        return [_COLUMN.sub(value, word) for word in self.words]

    def _check_program(self) -> None:
        words = [word for word in self.words if not (self.shell and re.match(r"\w+=", word))]
        if not words or _COLUMN.search(words[0]):
            raise ValueError(f"--agent_command {self.text!r} names no program: write one, then its arguments.")
        known = shutil.which(words[0]) or (self.shell and not re.fullmatch(r"[\w./-]+", words[0]))
        if self.shell and not known:
            known = not subprocess.call(
                ["/bin/sh", "-c", 'command -v "$1" > /dev/null', "sh", words[0]]
            )  # cd, for, ...
        if not known:
            raise ValueError(f"--agent_command: there is no program {words[0]}. Install it, or write its whole path.")
        script = words[1] if len(words) > 1 and not self.shell else ""
        if script.endswith(_SCRIPTS) and not _COLUMN.search(script) and not Path(script).is_file():
            raise ValueError(f"--agent_command: there is no file {script} in {Path.cwd()}. Write its whole path.")


class ProgramAgent(Agent):
    """Runs a command for each episode, in a session of its own, with the model at ``OPENAI_BASE_URL``."""

    def __init__(self, options: AgentConfig) -> None:
        assert options.agent_command is not None
        self.command = Command(options.agent_command)
        self.environment = usual_environment(options.agent_env)
        cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.running = asyncio.Semaphore(options.agent_concurrency or max(1, 4 * cores // ranks))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """``ValueError`` for a row without a column that the command names."""
        for prompt in prompts:
            if missing := sorted(self.command.columns - prompt.row.keys()):
                known = ", ".join(prompt.row) or "none"
                raise ValueError(
                    f"--agent_command: {{{missing[0]}}} is no column of row {prompt.index + 1} of {prompt.source}, "
                    f"which has: {known}. Correct the name."
                )

    def slot(self) -> AbstractAsyncContextManager[None]:
        """One of ``--agent_concurrency``."""
        return self.running

    async def start(self) -> None:
        """Listen on a free port."""
        self.gateway = Gateway()
        await self.gateway.start()

    async def stop(self) -> None:
        """Listen no more."""
        await self.gateway.stop()

    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Run the program; its reward is what it posted, else of the last line of its output."""
        key = self.gateway.open(session)
        with TemporaryFile() as output, TemporaryFile() as errors:
            try:
                status = await self._finished(task, key, output, errors)
            finally:
                posted = self.gateway.close(key)
                for name, value in (posted.reward or {}).items():
                    session.reward(value, name=name)
                session.output = _end_of(errors, 4096)
            if status != 0 and not posted.completed:
                what = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
                raise ProgramError(f"{what}: {(session.output.splitlines() or ['no output'])[-1]}")
            return None if posted.reward else printed_reward(_end_of(output, 65536))

    async def _finished(self, task: Task, key: str, output: IO[bytes], errors: IO[bytes]) -> int:
        """Exit status. All that the program started is killed at the end, and if this is cancelled."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command.arguments(task.prompt.row),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env=self.environment | self._of_episode(task, key),
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramError(f"cannot be started: {error.strerror}") from error
        assert process.stdin is not None
        try:
            texts = [text_of(message.get("content")) for message in task.messages]
            process.stdin.write("\n\n".join(texts).encode())
            process.stdin.close()
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _of_episode(self, task: Task, key: str) -> dict[str, str]:
        url, direct = self.gateway.base_url(key), "127.0.0.1,localhost"
        bypass = ",".join(filter(None, [self.environment.get("NO_PROXY", self.environment.get("no_proxy")), direct]))
        return {
            "OPENPPO_TASK": json.dumps(task.prompt.row, default=str),
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would be sent to OpenAI
            "NO_PROXY": bypass,
            "no_proxy": bypass,
        }


def usual_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """What a program needs of this one's environment, and the variables ``more``: no rank, no device, no token."""
    if unset := sorted(set(more) - os.environ.keys()):
        raise ValueError(f"--agent_env {unset[0]} is not set: export it before the run, or leave it out.")
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _USUAL or name.startswith(_USUAL_STARTS) or name in more
    }


def printed_reward(output: str) -> float | dict[str, float] | None:
    """``reward`` of the JSON object that is the last line; None without one, ``ValueError`` if it is no number."""
    lines = output.strip().splitlines()
    try:
        printed = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    reward = printed.get("reward") if isinstance(printed, dict) else None
    values = reward.values() if isinstance(reward, dict) else [] if reward is None else [reward]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"the reward {reward!r} of the last line of output is neither a number nor numbers by name")
    return reward


def _end_of(file: IO[bytes], n_bytes: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
    return file.read().decode(errors="replace").strip()
