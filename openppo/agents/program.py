"""A program that nobody changed, which talks to the gateway, as an agent."""

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
from openppo.agents.session import Session, Task
from openppo.config.agents import AgentConfig
from openppo.datasets.templates import text_of
from openppo.process_groups import HOLD, RELEASE, process_groups
from openppo.types import Ending, Prompt

_COLUMN = re.compile(r"(?<!\$)\{([\w.-]+)\}")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_USUAL = set(
    "PATH HOME USER LOGNAME SHELL TERM TZ LANG LANGUAGE TMPDIR TEMP TMP VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY".split()
)
_USUAL_STARTS = ("LC_", "PYTHON", "XDG_")


class ProgramError(Exception):
    """A program that ended with an error."""


class Command:
    """A command line for ``/bin/sh`` in which ``{column}`` stands for a row's value, one argument whatever it is."""

    def __init__(self, text: str) -> None:
        self.columns = list(dict.fromkeys(_COLUMN.findall(text)))
        # Values are parameters, which a shell does not read as its language.
        self.script = _COLUMN.sub(lambda found: f'"${{{1 + self.columns.index(found[1])}}}"', text)
        if inside := _COLUMN.search(" ".join(_QUOTED.findall(text))):
            raise ValueError(
                f"--agent_command: leave the quotes around {inside[0]} out; its value gets its own."
            )
        try:
            words = [word for word in shlex.split(text) if not re.match(r"\w+=", word)]
        except ValueError as error:
            raise ValueError(f"--agent_command {text}: {error}. Correct the quotes.") from error
        program, file = [*words, "", ""][:2]
        find = ["/bin/sh", "-c", 'command -v "$1" > /dev/null', "sh", program]
        if re.fullmatch(r"[\w./-]*", program) and subprocess.call(find) != 0:
            raise ValueError(
                f"--agent_command: there is no program {program!r}. Install it, or write its whole path."
            )
        if re.fullmatch(r"[\w./-]+\.(py|sh|js|ts)", file) and not Path(file).is_file():
            raise ValueError(
                f"--agent_command: there is no file {file} in {Path.cwd()}. Write its whole path."
            )

    def arguments(self, row: Mapping[str, Any]) -> list[str]:
        """What is executed for ``row``, once it reads ``RELEASE``: texts as they are, other values as JSON."""
        values = [row[column] for column in self.columns]
        texts = [
            value if isinstance(value, str) else json.dumps(value, default=str) for value in values
        ]
        return ["/bin/sh", "-c", HOLD + self.script, "sh", *texts]


class ProgramAgent(Agent):
    """A command for each episode, in its own process group, with the model at ``OPENAI_BASE_URL``."""

    def __init__(self, options: AgentConfig) -> None:
        assert options.agent_command is not None
        self.command = Command(options.agent_command)
        self.environment = usual_environment(options.agent_env)
        cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.running = asyncio.Semaphore(options.agent_concurrency or max(1, 4 * cores // ranks))

    def check(self, prompts: Sequence[Prompt]) -> None:
        """``ValueError`` for a row without a column that the command names."""
        for prompt in prompts:
            if missing := sorted(set(self.command.columns) - prompt.row.keys()):
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
                status = await self._finished(task, key, output, errors=errors)
            finally:
                self.gateway.close(key)
                session.output = _end_of(errors, 4096)
            if status != 0 and session.ending is not Ending.COMPLETED:
                raise ProgramError(
                    f"exit status {status}: {(session.output.splitlines() or ['no output'])[-1]}"
                )
            return None if session.rewards else printed_reward(_end_of(output, 65536))

    async def _finished(self, task: Task, key: str, output: IO[bytes], errors: IO[bytes]) -> int:
        """Exit status. All that the program started is killed at the end, when this is cancelled, and with the rank."""
        texts = [text_of(message.get("content")) for message in task.messages]
        process = await asyncio.create_subprocess_exec(
            *self.command.arguments(task.prompt.row),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env=self.environment | self._of_episode(task, key),
            start_new_session=True,
        )
        try:
            process_groups.add(process.pid)
            await process.communicate(RELEASE + "\n\n".join(texts).encode())
            return await process.wait()
        finally:
            process_groups.kill(process.pid)
            await process.wait()

    def _of_episode(self, task: Task, key: str) -> dict[str, str]:
        url, direct = self.gateway.base_url(key), "127.0.0.1,localhost"
        bypass = ",".join(
            filter(
                None, [self.environment.get("NO_PROXY", self.environment.get("no_proxy")), direct]
            )
        )
        return {
            "OPENPPO_TASK": row_json(task.prompt.row),
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",  # traces would be sent to OpenAI
            "NO_PROXY": bypass,
            "no_proxy": bypass,
        }


def usual_environment(more: Sequence[str] = ()) -> dict[str, str]:
    """Variables of this process that a program gets, and ``more``: no rank, device or token."""
    if unset := sorted(set(more) - os.environ.keys()):
        raise ValueError(
            f"--agent_env {unset[0]} is not set: export it before the run, or leave it out."
        )
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in _USUAL or name.startswith(_USUAL_STARTS) or name in more
    }


def row_json(row: Mapping[str, Any]) -> str:
    """A row in JSON, in which images that are no texts are null."""
    return json.dumps(
        row, default=lambda value: None if isinstance(value, bytes | Image) else str(value)
    )


def printed_reward(output: str) -> float | dict[str, float] | None:
    """``reward`` of the JSON object that is the last line; None without one."""
    try:
        printed = json.loads(output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return printed.get("reward") if isinstance(printed, dict) else None


def _end_of(file: IO[bytes], n_bytes: int) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
    return file.read().decode(errors="replace").strip()
