"""An unmodified program as an agent: it talks to the gateway."""

import asyncio
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from PIL.Image import Image

from openppo.agents.episodes import Agent
from openppo.agents.gateway.server import Gateway
from openppo.agents.session import Session
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import text_of
from openppo.process_groups import HOLD, RELEASE, process_groups
from openppo.types import Ending, EpisodeInput, Prompt

_COLUMN = re.compile(r"(?<!\$)\{([\w.-]+)\}")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_SCRIPT_FILE = re.compile(r"[\w./-]+\.(py|sh|js|ts)")
_USUAL = set(
    "PATH HOME USER LOGNAME SHELL TERM TZ LANG LANGUAGE TMPDIR TEMP TMP VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY".split()
)
"""Environment variables that every program gets, beside those that begin with ``_USUAL_STARTS``."""
_USUAL_STARTS = ("LC_", "PYTHON", "XDG_")


class ProgramError(Exception):
    """A program that ended with an error."""


class Command:
    """A command line for ``/bin/sh``, in which ``{column}`` stands for a row's value, always one argument."""

    def __init__(self, text: str) -> None:
        self.columns = list(dict.fromkeys(_COLUMN.findall(text)))
        # Values are parameters, which a shell does not read as its language.
        self.script = _COLUMN.sub(self._parameter, text)

        quoted_column = _COLUMN.search(" ".join(_QUOTED.findall(text)))
        if quoted_column:
            raise ValueError(
                f"--agent_command: leave the quotes around {quoted_column[0]} out; its value gets its own."
            )
        _check_files(text)

    def _parameter(self, column: re.Match[str]) -> str:
        """The shell parameter for a ``{column}``, in quotes."""
        number = 1 + self.columns.index(column[1])
        return f'"${{{number}}}"'

    def arguments(self, row: Mapping[str, Any]) -> list[str]:
        """Arguments to execute for ``row``, which wait for ``RELEASE``: texts unchanged, other values as JSON."""
        texts = []
        for column in self.columns:
            value = row[column]
            texts.append(value if isinstance(value, str) else json.dumps(value, default=str))
        return ["/bin/sh", "-c", HOLD + self.script, "sh", *texts]


def _check_files(text: str) -> None:
    """Raise ``ValueError`` if the program of a command line, or the script that it runs, is missing."""
    try:
        words = [word for word in shlex.split(text) if not re.match(r"\w+=", word)]
    except ValueError as error:
        raise ValueError(f"--agent_command {text}: {error}. Correct the quotes.") from error

    program = words[0] if words else ""
    find = ["/bin/sh", "-c", 'command -v "$1" > /dev/null', "sh", program]
    if re.fullmatch(r"[\w./-]*", program) and subprocess.call(find) != 0:
        raise ValueError(
            f"--agent_command: there is no program {program!r}. Install it, or write its whole path."
        )

    file = words[1] if len(words) > 1 else ""
    if _SCRIPT_FILE.fullmatch(file) and not Path(file).is_file():
        raise ValueError(
            f"--agent_command: there is no file {file} in {Path.cwd()}. Write its whole path."
        )


class ProgramAgent(Agent):
    """A command for each episode, in its own process group, with the model at ``OPENAI_BASE_URL``."""

    def __init__(self, options: AgentConfig) -> None:
        assert options.agent_command is not None
        self.command = Command(options.agent_command)
        self.environment = usual_environment(options.agent_env)
        n_cores = os.cpu_count() or 1
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        concurrency = options.agent_concurrency or max(1, 4 * n_cores // n_ranks)
        self.running = asyncio.Semaphore(concurrency)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ``ValueError`` for a row that lacks a column of the command."""
        for prompt in prompts:
            missing = sorted(set(self.command.columns) - prompt.row.keys())
            if missing:
                known = ", ".join(prompt.row) or "none"
                raise ValueError(
                    f"--agent_command: {{{missing[0]}}} is no column of row {prompt.index + 1} of {prompt.source}, "
                    f"which has: {known}. Correct the name."
                )

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Return the semaphore of ``agent_concurrency``."""
        return self.running

    async def start(self) -> None:
        """Listen on a free port."""
        self.gateway = Gateway()
        await self.gateway.start()

    async def stop(self) -> None:
        """Close the port."""
        await self.gateway.stop()

    async def run(self, task: EpisodeInput, session: Session) -> float | Mapping[str, float] | None:
        """Run the program; return the reward in the last line of its output, unless it posted any."""
        key = self.gateway.open(session)
        with TemporaryFile() as output, TemporaryFile() as errors:
            try:
                status = await self._finished(task, key, output, errors=errors)
            finally:
                self.gateway.close(key)
                session.record_output(_end_of(errors, 4096))

            if status != 0 and session.ending is not Ending.COMPLETED:
                last_line = (session.output.splitlines() or ["no output"])[-1]
                raise ProgramError(f"exit status {status}: {last_line}")
            if session.rewards:
                return None
            return printed_reward(_end_of(output, 65536))

    async def _finished(
        self, task: EpisodeInput, key: str, output: IO[bytes], errors: IO[bytes]
    ) -> int:
        """Run the program and return its exit status.

        All its processes are killed at the end, when this coroutine is cancelled, and when the rank ends.
        """
        texts = [text_of(message.get("content")) for message in task.messages]
        process = await asyncio.create_subprocess_exec(
            *self.command.arguments(task.prompt.row),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=self.environment | self._episode_environment(task, key),
            start_new_session=True,
        )
        try:
            process_groups.add(process.pid)
            await process.communicate(RELEASE + "\n\n".join(texts).encode())
            return await process.wait()
        finally:
            process_groups.kill(process.pid)
            await process.wait()

    def _episode_environment(self, task: EpisodeInput, key: str) -> dict[str, str]:
        """Environment variables of one episode: its row, and how to reach the gateway."""
        url = self.gateway.base_url(key)
        bypass = "127.0.0.1,localhost"
        users_bypass = self.environment.get("NO_PROXY", self.environment.get("no_proxy"))
        if users_bypass:
            bypass = f"{users_bypass},{bypass}"
        return {
            "OPENPPO_TASK": row_json(task.prompt.row),
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would be sent to OpenAI
            "NO_PROXY": bypass,
            "no_proxy": bypass,
        }


def usual_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Variables of this process for a program: usual ones and ``names``, but no rank, device or token."""
    unset = sorted(set(names) - os.environ.keys())
    if unset:
        raise ValueError(
            f"agent_env {unset[0]} is not set: export it before the run, or leave it out."
        )

    environment = {}
    for name, value in os.environ.items():
        is_usual = name.upper() in _USUAL or name.startswith(_USUAL_STARTS)
        if is_usual or name in names:
            environment[name] = value
    return environment


def row_json(row: Mapping[str, Any]) -> str:
    """Return a row as JSON; images that are no texts become null."""

    def as_json(value: Any) -> str | None:
        return None if isinstance(value, bytes | Image) else str(value)

    return json.dumps(row, default=as_json)


def printed_reward(output: str) -> float | dict[str, float] | None:
    """Return ``reward`` of the JSON object in the last line; None without one."""
    try:
        printed = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return printed.get("reward") if isinstance(printed, dict) else None


def _end_of(file: IO[bytes], n_bytes: int) -> str:
    """Return the last ``n_bytes`` of a file as text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - n_bytes))
    return file.read().decode(errors="replace").strip()
