"""A Python sandbox: code of the model runs in a process of its own, in an empty folder, within limits.

    python -m openppo.cli.train_ppo --tools examples/tools/sandbox.py ...

The system limits processor time, the memory of each process (on Linux), the size of each file, and where namespaces are
allowed the network. The number of processes, the memory of all and the size of the folder are looked at five times a
second; more may exist for a moment. All processes end with the call, and with the process that trains.

The rest is not limited: the code has the rights of the user who trains. ``LIMITS`` tells it, and is logged once. Run
training in a container if that matters.
"""

import asyncio
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from openppo.agents.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from openppo.process_groups import RELEASE, held, process_groups

SECONDS = 10
MEMORY = 512 * 2**20  # of each process, and in use by all
FILES = 16 * 2**20  # of each file, and of the folder
PROCESSES = 32
MOST = 64 * 2**10  # bytes that are read of what the code prints
INTERVAL = 0.2  # seconds between two looks at processes and folder
NAMESPACES = "unshare --user --map-current-user --net --pid --fork --kill-child".split()


def has_namespaces() -> bool:
    """Whether this system allows namespaces."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACES, "true"], stderr=subprocess.DEVNULL).returncode == 0


def unlimited() -> list[str]:
    """What is not limited on this system."""
    missing = [
        "what the code reads of this user's files and Unix sockets",
        "what it writes outside its folder, as in /tmp and /dev/shm",
        "use of processors and disks",
    ]
    if not CONFINED:
        missing.append(
            "network, signals to this user's processes, processes that leave their group (no unshare here)"
        )
    return missing


CONFINED = has_namespaces()
LIMITS = unlimited()
logging.getLogger("openppo").warning(
    "examples/tools/sandbox.py does not limit: %s", "; ".join(LIMITS)
)


class Sandbox(BaseTool):
    """Runs Python code; each episode has a folder, which its calls share."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        super().__init__(config, tool_schema)
        self.seconds, self.memory = config.get("seconds", SECONDS), config.get("memory", MEMORY)
        self.files, self.processes = config.get("files", FILES), config.get("processes", PROCESSES)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "python",
                    "description": "Run Python code and return what it prints. Files stay until the task is done.",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "code": {"type": "string", "description": "Python code that prints"}
                        },
                        "required": ["code"],
                    },
                },
            }
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return tempfile.mkdtemp(prefix="sandbox-")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> ToolResponse:
        folder = Path(instance_id)
        if self._is_full(folder):
            return ToolResponse(text=self._too_much(f"{self.files // 2**20} MiB of files"))
        # A file: asyncio would wait for ever for the end of a process whose pipe is full.
        with tempfile.TemporaryFile() as output:
            process = await asyncio.create_subprocess_exec(
                *held(
                    *(NAMESPACES if CONFINED else []),
                    sys.executable,
                    "-I",
                    "-c",
                    str(parameters.get("code", "")),
                ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": instance_id, "TMPDIR": instance_id},
                preexec_fn=self._limit,
                start_new_session=True,
            )
            try:
                process_groups.add(process.pid)
                assert process.stdin is not None
                process.stdin.write(RELEASE)
                process.stdin.close()
                return ToolResponse(text=await self._answer(process, folder, output))
            finally:
                process_groups.kill(process.pid)
                await process.wait()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        shutil.rmtree(instance_id, ignore_errors=True)

    async def _answer(
        self, process: asyncio.subprocess.Process, folder: Path, output: IO[bytes]
    ) -> str:
        """What the code prints, or which limit it has passed."""
        ending = asyncio.create_task(process.wait())
        watching = asyncio.create_task(self._passed(process.pid, folder, output))
        try:
            done, _ = await asyncio.wait(
                [watching, ending], timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ending.cancel()
            watching.cancel()

        if watching in done:
            return watching.result()
        if ending in done:
            return printed(output) or "(The code printed nothing.)"
        return f"Error: the code ran longer than {self.seconds} s."

    async def _passed(self, pid: int, folder: Path, output: IO[bytes]) -> str:
        """Wait until the code has printed ``MOST`` or passed a limit; return the output, or which limit."""
        while True:
            await asyncio.sleep(INTERVAL)
            if os.fstat(output.fileno()).st_size >= MOST:
                return printed(output)

            sizes = memory_of_processes(pid)
            if len(sizes) > self.processes:
                return self._too_much(f"{self.processes} processes")
            if sum(sizes) > self.memory:
                return self._too_much(f"{self.memory // 2**20} MiB of memory in all its processes")
            if self._is_full(folder):
                return self._too_much(f"{self.files // 2**20} MiB of files")

    def _is_full(self, folder: Path) -> bool:
        return size_of_folder(folder) > self.files

    def _too_much(self, amount: str) -> str:
        return f"Error: the code has more than {amount}."

    def _limit(self) -> None:
        """In the new process, before it runs anything."""
        for what, limit in (
            (resource.RLIMIT_CPU, self.seconds + 1),
            (resource.RLIMIT_AS, self.memory),
            (resource.RLIMIT_FSIZE, FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (limit, limit))


def printed(output: IO[bytes]) -> str:
    """The first ``MOST`` bytes of what the code has printed."""
    return os.pread(output.fileno(), MOST, 0).decode(errors="replace")


def memory_of_processes(pid: int) -> list[int]:
    """Bytes of memory of each process below ``pid``, and of itself."""
    sizes = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                sizes.append(member.memory_info().rss)
    return sizes


def size_of_folder(folder: Path) -> int:
    """Bytes of disk that files and folders take, empty ones too."""
    size = 0
    for root, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            with suppress(OSError):  # it was removed
                size += max(4096, 512 * os.lstat(os.path.join(root, name)).st_blocks)
    return size
