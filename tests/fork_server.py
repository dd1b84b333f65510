"""Run Python programs without their imports: one process imports the libraries and forks every run.

``Launcher().run(["-m", "openppo.cli.train_ppo", ...], ranks=2)`` does what ``subprocess.run`` of ``python`` or torchrun
does. The server only imports: it has one thread, and no tensor, process group or tokenizer is ever used in it. For each
run it forks an agent, which forks the ranks, hosts their store and ends them all if one fails, like that of torchrun.

What a fork cannot show needs ``real=True``: what is imported, what is read at import (``READ_AT_IMPORT``), torchrun
itself (signals, restarts), the end of Python. All ranks share one hash seed. Every run is a real one where there is a
GPU, or no Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

REPO = Path(__file__).resolve().parents[1]
IMPORTED = (
    *("torch", "transformers", "deepspeed", "peft", "datasets", "tensorboard", "unittest.mock"),
    *("openppo.trainer.build", "openppo.trainer.supervised.build", "openppo.cli.options", "openppo.config"),
)
READ_AT_IMPORT = ("PYTHON", "DS_ACCELERATOR", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "LD_", "TORCHELASTIC_")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 900  # other tests run beside it
SECONDS_TO_END_AFTER_SIGTERM = 30  # as torchrun has it
PR_SET_PDEATHSIG = 1
_exit = os._exit  # openppo.user_code puts one of its own in its place


class Launcher:
    """Runs Python programs, forked from a server that starts with the first one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork")
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self,
        words: Sequence[object],
        ranks: int = 0,
        cwd: Path | None = None,
        real: bool = False,
        separate: bool = False,
        timeout: float = SECONDS_UNTIL_A_HANG_IS_CERTAIN,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Status and output of ``python WORDS``, or of torchrun with so many ranks.

        stderr is in stdout unless ``separate``; ``variables`` are added to the environment. ``TimeoutExpired`` has the
        output until then.
        """
        import torch

        words = [str(word) for word in words]
        environment = {k: v for k, v in os.environ.items() if k not in OF_RANKS} | ENVIRONMENT | variables
        if real or sys.platform != "linux" or torch.cuda.is_available():
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
            return subprocess.run(
                [sys.executable, *torchrun, *words],
                cwd=cwd,
                env=environment,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if separate else subprocess.STDOUT,
                text=True,
            )
        return self._fork(words, ranks, cwd, environment, separate, timeout)

    def _fork(
        self, words: list[str], ranks: int, cwd: Path | None, env: Mapping[str, str], separate: bool, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        request = {"words": words, "ranks": ranks, "cwd": str(cwd or Path.cwd()), "env": env, "timeout": timeout}
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1 + separate)]
            status = ask(self._address(), request, files[0].fileno(), files[-1].fileno())
            printed = []
            for file in files:
                file.seek(0)
                printed.append(file.read().decode(errors="replace"))
        if status == "timeout":
            raise subprocess.TimeoutExpired(words, timeout, output=printed[0].encode())
        assert isinstance(status, int), status
        return subprocess.CompletedProcess(words, status, *printed)

    def programs(self) -> Path:
        """A folder for PATH: its ``python`` and ``torchrun`` let the server run what scripts ask of them."""
        folder, address = Path(self._folder.name) / "bin", self._address()
        folder.mkdir(exist_ok=True)
        for name in ("python", "torchrun"):
            call = shlex.join([sys.executable, "-IS", __file__, address, name])
            (folder / name).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def _address(self) -> str:
        """Where the server listens, which is started if there is none."""
        path = f"{self._folder.name}/socket"
        with self._lock:
            if self._server is None:
                self._server = subprocess.Popen(
                    [sys.executable, __file__, path],
                    env=os.environ | ENVIRONMENT | ONE_THREAD,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                assert self._server.stdout is not None
                said = self._server.stdout.readline()
                assert said == b"ready\n", said
        return path

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait()
        self._folder.cleanup()


def ask(address: str, request: Mapping[str, Any], stdout: int, stderr: int) -> int | str:
    """The exit status of a run whose output goes to these files; a text if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"!"], [stdout, stderr])
        connection.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(connection.makefile().readline() or '"the fork server ended"')


def stand_in(address: str, program: str, words: list[str]) -> None:
    """Be ``python`` or ``torchrun`` for a script: by the server what it can run, else by the real program."""
    launcher, ranks = ["-m", "torch.distributed.run"] if program == "torchrun" else [], 0
    flags = re.match(r"--standalone --nproc_per_node (\d+)( --max_restarts \d+)? (?!--)", f"{shlex.join(words)} ")
    if launcher and flags:  # a run that does not fail is not restarted
        n_flags = len(flags[0].split())
        ranks, program, launcher, words = int(flags[1]), "python", launcher + words[:n_flags], words[n_flags:]
    if program == "python" and (words[0] in ("-m", "-c") or not words[0].startswith("-")):
        request = {"words": words, "ranks": ranks, "cwd": os.getcwd(), "env": {**os.environ}}
        status = ask(address, request | {"timeout": SECONDS_UNTIL_A_HANG_IS_CERTAIN}, 1, 2)
        if isinstance(status, int):
            sys.exit(status if status >= 0 else 128 - status)
    os.execv(sys.executable, [sys.executable, *launcher, *words])


def serve(path: str) -> None:
    """Import everything, then fork an agent for each connection, until stdin is closed."""
    environment = {**os.environ}
    for name in IMPORTED:
        import_module(name)
    sys.modules["torch"].set_num_threads(1)
    sys.path.pop(0)  # the folder of this file
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
        while 0 not in (ready := select.select([0, listener], [], [], 1)[0]):
            if ready:
                connection = listener.accept()[0]
                if fork() == 0:
                    listener.close()
                    _exit(act(connection, environment))
                connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def fork() -> int:
    """``os.fork`` in a process of one thread; the child dies with it."""
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    assert len(tasks) == 1, f"a fork would lose locks that these hold: {tasks}"
    gc.freeze()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            _exit(1)
    return pid


def act(connection: socket.socket, environment: Mapping[str, str]) -> int:
    """Start the ranks of one run, wait for them, and tell the status that torchrun or the one program would have."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 2)
    request = json.loads(connection.makefile().readline())
    ranks, deadline = request["ranks"], time.monotonic() + request["timeout"]
    names = [n for n in {*request["env"], *environment} - ONE_THREAD.keys() if n.startswith(READ_AT_IMPORT)]
    if differ := [name for name in names if request["env"].get(name) != environment.get(name)]:
        connection.sendall(json.dumps(f"{differ} are read at import: needs real=True").encode() + b"\n")
        return 1
    address, tell = os.pipe()
    pids = []
    for rank in range(max(ranks, 1)):
        if (pid := fork()) == 0:
            os.close(tell)
            connection.close()
            become(request, rank, address, fds)
        pids.append(pid)
    if ranks:  # only now, since it has threads
        store = sys.modules["torch.distributed"].TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(tell, f"{store.port:5d}".encode() * ranks)
    statuses, failed_at = {}, None
    running = {os.pidfd_open(pid): pid for pid in pids}
    while running:
        for fd in select.select([connection, *running], [], [], 0.5)[0]:
            if fd is connection:  # nobody waits any more
                end(running.values(), signal.SIGKILL)
                return 1
            pid = running.pop(fd)
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if statuses[pid] != 0 and failed_at is None:
                failed_at = time.monotonic()
                end(running.values(), signal.SIGTERM)
        if time.monotonic() > (deadline if failed_at is None else failed_at + SECONDS_TO_END_AFTER_SIGTERM):
            end(running.values(), signal.SIGKILL)
    status: int | str = int(any(statuses.values())) if ranks else statuses[pids[0]]
    if failed_at is not None and failed_at > deadline:
        status = "timeout"
    connection.sendall(json.dumps(status).encode() + b"\n")
    return 0


def end(pids: Any, number: signal.Signals) -> None:
    """Send a signal to the sessions of these processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def become(request: dict[str, Any], rank: int, address: int, fds: list[int]) -> None:
    """Make this process what ``python WORDS`` would be, run the program, and end."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (None, signal.SIG_IGN):  # ignored ones stay so, as with nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    if ranks := request["ranks"]:
        port = os.read(address, 5).decode().strip()
        for name in ("LOCAL_RANK", "RANK", "ROLE_RANK"):
            os.environ[name] = str(rank)
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"):
            os.environ[name] = str(ranks)
        os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        os.environ["TORCHELASTIC_RUN_ID"] = "forked"
    os.close(address)
    os.chdir(request["cwd"])
    sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()  # Python's own is seeded anew by the fork
    sys.modules["torch"].default_generator.seed()
    importlib.invalidate_caches()
    status = 1
    try:
        execute(request["words"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:  # as Python does, whatever it is
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _exit(status & 0xFF)


def execute(words: list[str]) -> None:
    """Run ``-m module``, ``-c program`` or a script as ``__main__``."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    if words[0] == "-c":
        sys.path.insert(0, "")
        code, sys.argv = compile(words[1], "<string>", "exec"), ["-c", *words[2:]]
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(words[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{words[1]}.__main__")
        assert spec is not None and spec.origin is not None and spec.loader is not None, words
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        code, sys.argv = spec.loader.get_code(spec.name), [spec.origin, *words[2:]]  # type: ignore[attr-defined]
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__file__ = words[0]
        code, sys.argv = compile(Path(words[0]).read_bytes(), words[0], "exec"), words
    sys.orig_argv = [sys.executable, *words]
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[2:]:
        stand_in(sys.argv[1], sys.argv[2], sys.argv[3:])
    serve(sys.argv[1])
