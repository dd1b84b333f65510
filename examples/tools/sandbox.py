"""A Python sandbox: code of the model runs in a process of its own, in an empty folder, within limits.

    python -m openppo.cli.train_ppo --tools examples/tools/sandbox.py ...

Time, memory and the size of files are limited, and where the system allows it the network is taken away.
``LIMITS`` tells what could not be limited here; it is logged once. The code has the rights of the user who trains: it
can read that user's files. Run training in a container if that matters.
"""

import asyncio
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse

SECONDS = 10
MEMORY = 512 * 2**20
FILES = 16 * 2**20
MOST = 64 * 2**10  # bytes that are read of what the code prints
NAMESPACES = "unshare --user --map-current-user --net --pid --fork --kill-child".split()


def unlimited() -> list[str]:
    """What cannot be limited on this system."""
    missing = []
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0:
        missing.append("the network: unshare --user --net --pid is not allowed")
    return missing


LIMITS = unlimited()
if LIMITS:
    logging.getLogger("openppo").warning("examples/tools/sandbox.py does not limit %s", "; ".join(LIMITS))


class Sandbox(BaseTool):
    """Runs Python code; each episode has a folder, which its calls share."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self.seconds, self.memory = config.get("seconds", SECONDS), config.get("memory", MEMORY)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "python",
                    "description": "Run Python code and return what it prints. Files stay until the task is done.",
                    "parameters": {
                        "type": "object",
                        "properties": {"code": {"type": "string", "description": "Python code that prints"}},
                        "required": ["code"],
                    },
                },
            }
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return tempfile.mkdtemp(prefix="sandbox-")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        command = [sys.executable, "-I", "-c", str(parameters.get("code", ""))]
        process = await asyncio.create_subprocess_exec(
            *([] if LIMITS else NAMESPACES),
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=instance_id,
            env={"PATH": os.defpath, "HOME": instance_id, "TMPDIR": instance_id},
            preexec_fn=self._limit,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self.seconds):
                said = b""
                while len(said) <= MOST and (more := await process.stdout.read(MOST)):
                    said += more
        except TimeoutError:
            return ToolResponse(text=f"Error: the code ran longer than {self.seconds} s.")
        finally:
            await self._end(process)
        text = said[:MOST].decode(errors="replace")
        return ToolResponse(text=text or "(The code printed nothing.)")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        shutil.rmtree(instance_id, ignore_errors=True)

    def _limit(self) -> None:
        """In the new process, before it runs anything."""
        for what, limit in (
            (resource.RLIMIT_CPU, self.seconds + 1),
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_FSIZE, FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (limit, limit))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill it with its children, whether it has ended or not."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
