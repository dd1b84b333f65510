"""DeepSpeed's CPU Adam, compiled once on a machine for each version of DeepSpeed and torch.

torch guards a build with a file: if a killed process leaves it behind, later processes wait forever. Here processes
take turns by a lock of the operating system, which ends with its owner. So a file that the next owner finds is left
over, and can be removed.
"""

import fcntl
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import deepspeed
import torch
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch.utils import cpp_extension

from openppo import logger

_PROGRAM = Path(__file__).with_name("compile_cpu_adam.py")
_VERSIONS = f"deepspeed {deepspeed.__version__}, torch {torch.__version__}"
"""Text of the lock file while the compiled library is complete and was built for these versions."""


def load_cpu_adam() -> None:
    """Load the operators of ``DeepSpeedCPUAdam``, compiled first if need be; ``ValueError`` if that fails."""
    if installed_ops.get(CPUAdamBuilder.NAME):  # compiled when DeepSpeed was installed
        return
    try:
        folder = Path(cpp_extension._get_build_directory(CPUAdamBuilder.NAME, verbose=False))
        with open(folder / "openppo.lock", "a+", encoding="utf-8") as lock:
            _acquire(lock)
            _compile(folder, lock)
            CPUAdamBuilder().load()
    except OSError as error:
        raise ValueError(
            f"--adam_offload: what it compiles cannot be stored ({error}). Name another folder with "
            "TORCH_EXTENSIONS_DIR, or omit the flag."
        ) from error


def is_compiled() -> bool:
    """True if the operators of ``DeepSpeedCPUAdam`` need not be compiled any more; nothing is written."""
    if installed_ops.get(CPUAdamBuilder.NAME):
        return True
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    locks = Path(root).glob(f"**/{CPUAdamBuilder.NAME}/openppo.lock")
    return any(_is_complete(lock.parent, lock.read_text(encoding="utf-8")) for lock in locks)


def _is_complete(folder: Path, versions: str) -> bool:
    """True if ``folder`` holds the whole library, for the ``versions`` of its lock."""
    return versions == _VERSIONS and (folder / f"{CPUAdamBuilder.NAME}.so").is_file()


def _acquire(lock: IO[str]) -> None:
    """Wait until no other process has the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info(
            "--adam_offload: waiting for another process that compiles DeepSpeed's CPU Adam"
        )
        fcntl.flock(lock, fcntl.LOCK_EX)


def _compile(folder: Path, lock: IO[str]) -> None:
    """Compile the library in ``folder``, whose ``lock`` is held, unless it is already there."""
    left_over = folder / "lock"
    if left_over.exists():
        logger.warning(
            "--adam_offload: removed %s, which an interrupted compilation has left", left_over
        )
        left_over.unlink()

    lock.seek(0)
    if _is_complete(folder, lock.read()):
        return

    lock.truncate(0)
    logger.info("--adam_offload: compiling DeepSpeed's CPU Adam, about 100 seconds the first time")
    status, output = _run_program(lock)
    if status != 0:
        logger.warning("%s", output)
        raise ValueError(
            f"--adam_offload: DeepSpeed's CPU Adam was not compiled (exit status {status}, see above). Correct the "
            "compiler, or omit the flag."
        )
    lock.write(_VERSIONS)
    lock.flush()


def _run_program(lock: IO[str]) -> tuple[int, str]:
    """Return exit status and output of ``_PROGRAM``, which shares the lock and ends with this process."""
    # -P: the module deepspeed.py beside the program is not the library.
    command = [sys.executable, "-P", str(_PROGRAM), str(os.getpid())]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[lock.fileno()],
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    return process.returncode, output
