"""Run Python programs without their imports: one process imports the libraries and forks every run.

``Launcher().run(["-m", "openppo.cli.train_ppo", ...], ranks=2)`` does what ``subprocess.run`` of ``python`` or torchrun
does. The server only imports: it has one thread, and no tensor, process group or tokenizer is ever used in it. For each
run it forks an agent, which forks the ranks, hosts their store and ends them all if one fails, like that of torchrun.

Use ``real=True`` for what a fork does not show: imports, torchrun itself (signals, restarts), the shutdown of the
interpreter. Without it, another value of a variable in ``READ_AT_IMPORT`` is refused. With a GPU, or without Linux,
``Launcher.run`` starts real programs.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

REPO = Path(__file__).resolve().parents[1]
IMPORTED = """torch transformers deepspeed peft datasets tensorboard unittest.mock openppo.build.rank
    openppo.build.supervised openppo.cli.options openppo.config""".split()
READ_AT_IMPORT = tuple(
    """PYTHON DS_ACCELERATOR HF_ TRANSFORMERS_ OMP_ MKL_ LD_ TORCHELASTIC_ HOME XDG_CACHE_HOME TORCH_ LC_ALL
    LANG""".split()
)
PYTHON_PATH = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Before what is there: a machine may have its packages in folders that only this variable names."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "HF_HUB_OFFLINE": "1"}
ONE_THREAD = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
}
OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SECONDS_UNTIL_A_HANG_IS_CERTAIN = 900  # other tests run beside it
SECONDS_TO_END_AFTER_SIGTERM = 30  # the default of torchrun
PR_SET_PDEATHSIG = 1


class Launcher:
    """Runs Python programs, forked from a server that starts with the first one."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork")
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._environment = os.environ | ENVIRONMENT | ONE_THREAD  # before a test changes it

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

        stderr is in stdout unless ``separate``; ``variables`` are added to the environment.
        """
        import torch

        words = [str(word) for word in words]
        environment = (
            {k: v for k, v in os.environ.items() if k not in OF_RANKS} | ENVIRONMENT | variables
        )
        if real or sys.platform != "linux" or torch.cuda.is_available():
            torchrun = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
                if ranks
                else []
            )
            stderr, pipe = subprocess.PIPE if separate else subprocess.STDOUT, subprocess.PIPE
            streams: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": pipe,
                "stderr": stderr,
                "text": True,
            }
            command = [sys.executable, *torchrun, *words]
            return subprocess.run(command, cwd=cwd, env=environment, timeout=timeout, **streams)
        request = {"words": words, "ranks": ranks, "cwd": str(cwd or Path.cwd())}
        request |= {"env": environment, "timeout": timeout}
        with contextlib.ExitStack() as stack:
            stdin = stack.enter_context(open(os.devnull))
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1 + separate)]
            status = ask(
                self._address(), request, stdin.fileno(), files[0].fileno(), files[-1].fileno()
            )
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
        """Start the server if none runs; return the address where it listens."""
        path = f"{self._folder.name}/socket"
        with self._lock:
            if self._server is None or self._server.poll() is not None:
                Path(path).unlink(missing_ok=True)
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                command = [sys.executable, __file__, path]
                self._server = subprocess.Popen(
                    command, env=self._environment, start_new_session=True, **pipes
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


def ask(address: str, request: Mapping[str, Any], *files: int) -> int | str:
    """The exit status of a run with these files as stdin, stdout and stderr; a text if there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"!"], files)
        connection.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(connection.makefile().readline() or '"the fork server ended"')


def stand_in(address: str, program: str, words: list[str]) -> None:
    """Stand for ``python`` or ``torchrun`` in a script; execute the real program if a fork cannot do the same."""
    launcher, ranks = ["-m", "torch.distributed.run"] if program == "torchrun" else [], 0
    flags = re.match(r"--standalone --nproc_per_node (\d+) (?!--)", f"{shlex.join(words)} ")
    if launcher and flags:
        ranks, program, launcher, words = int(flags[1]), "python", launcher + words[:3], words[3:]
    if program == "python" and words and (words[0] in ("-m", "-c") or not words[0].startswith("-")):
        request = {"words": words, "ranks": ranks, "cwd": os.getcwd(), "env": {**os.environ}}
        status = ask(address, request | {"timeout": SECONDS_UNTIL_A_HANG_IS_CERTAIN}, *range(3))
        if isinstance(status, int):
            sys.exit(status if status >= 0 else 128 - status)
        if not status.endswith("needs real=True"):
            print(f"{shlex.join(words)}: {status}", file=sys.stderr)
            sys.exit(124 if status == "timeout" else 1)
    os.execv(sys.executable, [sys.executable, *launcher, *words])


def serve(path: str) -> None:
    """Import everything, then fork an agent for each connection, until stdin is closed."""
    environment, places = {**os.environ}, sys.path[1:]  # without the folder of this file
    for name in IMPORTED:
        import_module(name)
    sys.modules["torch"].set_num_threads(1)
    sys.path[:] = places
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        os.write(1, b"ready\n")
        while 0 not in (ready := select.select([0, listener], [], [], 1)[0]):
            if ready:
                connection = listener.accept()[0]
                if fork() == 0:
                    listener.close()
                    os._exit(act(connection, environment))
                connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def fork() -> int:
    """``os.fork`` in a process of one thread; the child dies with it."""
    tasks = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip()
        for task in os.listdir("/proc/self/task")
    ]
    assert len(tasks) == 1, f"a fork would lose locks that these hold: {tasks}"
    gc.freeze()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return pid


def act(connection: socket.socket, environment: Mapping[str, str]) -> int:
    """Start the ranks of one run, wait for them, and tell the status that torchrun or the one program would have."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    ranks, deadline = request["ranks"], time.monotonic() + request["timeout"]
    names = [
        n
        for n in {*request["env"], *environment} - ONE_THREAD.keys()
        if n.startswith(READ_AT_IMPORT)
    ]
    if differ := [name for name in names if request["env"].get(name) != environment.get(name)]:
        connection.sendall(
            json.dumps(f"{differ} are read at import: needs real=True").encode() + b"\n"
        )
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
        store = sys.modules["torch.distributed"].TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False
        )
        os.write(tell, f"{store.port:5d}".encode() * ranks)
    statuses, failed_at = {}, None
    running = {os.pidfd_open(pid): pid for pid in pids}
    while running:
        for fd in select.select([connection, *running], [], [], 0.5)[0]:
            if fd is connection:  # the client has closed it
                end(running.values(), signal.SIGKILL)
                return 1
            pid = running.pop(fd)
            statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if statuses[pid] != 0 and failed_at is None:
                failed_at = time.monotonic()
                end(running.values(), signal.SIGTERM)
        if time.monotonic() > (
            deadline if failed_at is None else failed_at + SECONDS_TO_END_AFTER_SIGTERM
        ):
            end(running.values(), signal.SIGKILL)
    end(pids, signal.SIGKILL)  # what ranks have left in their sessions
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
    """Run ``python WORDS`` in this process, and end it."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (
            None,
            signal.SIG_IGN,
        ):  # ignored ones stay so, as with nohup
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # TMPDIR may be another
    if ranks := request["ranks"]:
        port = os.read(address, 5).decode().strip()
        os.environ |= dict.fromkeys(("LOCAL_RANK", "RANK", "ROLE_RANK"), str(rank))
        os.environ |= dict.fromkeys(
            ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)
        )
        os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
        os.environ |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
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
        if not isinstance(ended.code, int | None):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:  # as Python does, whatever it is
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def execute(words: list[str]) -> None:
    """Run ``-m module``, ``-c program`` or a script as ``__main__``."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-c":
        sys.path.insert(0, "")
        code, sys.argv = (
            compile(words[1], "<string>", "exec", dont_inherit=True),
            ["-c", *words[2:]],
        )
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    else:
        main.__file__, sys.argv = os.path.abspath(words[0]), words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        code = compile(Path(words[0]).read_bytes(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[2:]:
        stand_in(sys.argv[1], sys.argv[2], sys.argv[3:])
    serve(sys.argv[1])
