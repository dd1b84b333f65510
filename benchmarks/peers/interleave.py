"""Runs participants in turns: each is a process of its own that has loaded everything and waits for a line.

The other side is ``turns.py``. Of all participants only one works at a time.
"""

import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from peers.measure import Iteration, Summary, summarize, undisturbed

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CACHE = Path.home() / ".cache" / "openppo-benchmarks"
SETUP = "bash benchmarks/peers/setup.sh"
LOADING_S, ITERATION_S = 300, 600  # longer means that it hangs
SETTLING_S = 5  # at most, until nothing runs: vLLM spins for a second after work, in the way of the next participant


def python_path(repository: Path = REPOSITORY) -> str:
    """A checkout before what PYTHONPATH has: there a machine may have packages that nothing else names."""
    return os.pathsep.join([str(repository), *filter(None, [os.environ.get("PYTHONPATH")])])


class ParticipantError(Exception):
    """A participant that cannot take part, or no longer; says why."""


@dataclass(frozen=True)
class Entry:
    """A participant: the script of this folder and the environment (none: this Python) that run it."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    n_ranks: int = 1
    threads: int = 2
    checkout: Path | None = None
    """Another checkout of OpenPPO, whose package and script are run."""


@dataclass
class Rounds:
    """Turns of each participant. After the first measured round, one that would not end before ``deadline`` (of
    ``time.monotonic``) is left out."""

    warm_up: int
    measured: int
    extra: int
    """More rounds for those that were disturbed."""
    deadline: float = float("inf")


@dataclass
class Participant:
    """The processes of an entry, one for each rank. Rank 0's answers count."""

    entry: Entry
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    run_folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=tempfile.TemporaryDirectory
    )
    versions: dict[str, str] = field(default_factory=dict)
    iterations: list[Iteration] = field(default_factory=list)
    peak_mb: float = 0.0

    def start(self, folder: Path, arguments: Sequence[str]) -> None:
        """Begin to load; ``folder`` has the environments."""
        entry = self.entry
        python = (
            Path(sys.executable)
            if entry.environment is None
            else folder / entry.environment / "bin" / "python"
        )
        if not python.exists():
            raise ParticipantError(f"there is no {python}: run {SETUP} {folder}")
        environment = os.environ | {
            "OMP_NUM_THREADS": str(entry.threads),
            "PYTHONPATH": python_path(entry.checkout or REPOSITORY)
            if entry.environment is None
            else "",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "RUN_FOLDER": self.run_folder.name,
        }
        if entry.n_ranks > 1:
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": _free_port(),
                "WORLD_SIZE": str(entry.n_ranks),
            }
        script = (
            HERE if entry.checkout is None else entry.checkout / "benchmarks" / "peers"
        ) / entry.script
        for rank in range(entry.n_ranks):
            ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if entry.n_ranks > 1 else {}
            process = subprocess.Popen(
                [str(python), str(script), *arguments, *entry.arguments],
                env=environment | ranked,
                cwd=tempfile.gettempdir(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                bufsize=0,
                start_new_session=True,  # which tells its processes from others
            )
            self.processes.append(process)

    def wait_until_ready(self) -> None:
        """Until everything is loaded."""
        for answer in self._answers(LOADING_S):
            if "skip" in answer:
                raise ParticipantError(answer["skip"])
            self.versions = answer["ready"] if not self.versions else self.versions

    def turn(self) -> Iteration:
        """One iteration."""
        wait_until_idle()
        start, others = time.monotonic(), self._cpu_seconds_of_others()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        answer = self._answers(ITERATION_S)[0]
        return answer | {
            "others": (self._cpu_seconds_of_others() - others) / (time.monotonic() - start)
        }

    def finish(self) -> None:
        """No more turns: take the peak of all ranks together."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        self.peak_mb = sum(answer["peak_mb"] for answer in self._answers(LOADING_S))

    def stop(self) -> None:
        """End the processes, whatever they do."""
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.run_folder.cleanup()

    def _cpu_seconds_of_others(self) -> float:
        """CPU time that processes of other sessions, the kernel and the host have used so far."""
        sessions, own = {process.pid for process in self.processes}, 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                numbers = (
                    file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                )
                if int(numbers[3]) in sessions:
                    own += sum(
                        map(int, numbers[11:15])
                    )  # user and system, of it and of its children that ended
        return cpu_seconds() - own / os.sysconf("SC_CLK_TCK")

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        return [self._answer(process, timeout) for process in self.processes]

    def _answer(self, process: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], timeout)[0]:
            os.killpg(process.pid, signal.SIGKILL)
            raise ParticipantError(f"no answer within {timeout} s{self.last_lines()}")
        line = process.stdout.readline()
        if not line:
            raise ParticipantError(f"ended with code {process.wait()}{self.last_lines()}")
        return json.loads(line)

    def last_lines(self) -> str:
        """The end of its log, an indented line each."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-8:]
        return "".join(f"\n    {line}" for line in lines)


def cpu_seconds() -> float:
    """CPU time that all processes, the kernel and the host have used so far."""
    counters = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counters)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_idle() -> None:
    """Until a quarter of a second passes in which nearly nothing runs, or for ``SETTLING_S``."""
    latest = time.monotonic() + SETTLING_S
    while time.monotonic() < latest:
        before = cpu_seconds()
        time.sleep(0.25)
        if cpu_seconds() - before <= 0.03:
            break


def run_cell(
    entries: Sequence[Entry], arguments: Sequence[str], environments: Path, rounds: Rounds
) -> tuple[list[Summary], dict[str, dict[str, str]]]:
    """Interleave ``entries``. Returns summaries and versions of those that took part; says why others did not."""
    running: list[Participant] = []
    started: list[Participant] = []
    try:
        for entry in entries:
            participant = Participant(entry)
            started.append(participant)
            if _has_work(participant, partial(participant.start, environments, arguments)):
                running.append(participant)
        running = [p for p in running if _has_work(p, p.wait_until_ready)]
        running = take_turns(running, rounds)
        running = [p for p in running if _has_work(p, p.finish)]
    finally:
        for participant in started:
            for process in participant.processes:
                if process.stdin is not None:
                    process.stdin.close()
            participant.stop()
    summaries = [summarize(p.entry.name, p.iterations, p.peak_mb) for p in running if p.iterations]
    return summaries, {p.entry.name: p.versions for p in running}


def take_turns(running: list[Participant], rounds: Rounds) -> list[Participant]:
    """Warm up, then measure; those that were disturbed get more turns. Returns those that did not fail."""
    last_round_s = 0.0
    for number in range(rounds.warm_up + rounds.measured + rounds.extra):
        measured = number >= rounds.warm_up
        due = running
        if number >= rounds.warm_up + rounds.measured:
            due = [p for p in running if len(undisturbed(p.iterations)) < rounds.measured]
        if not due:
            break
        began = time.monotonic()
        if number > rounds.warm_up and began + last_round_s > rounds.deadline:
            say(f"  no time for more than {number - rounds.warm_up} rounds")
            break
        shift = number % len(due)  # nobody always comes after the same neighbour
        for participant in [*due[shift:], *due[:shift]]:
            if not _has_work(participant, partial(_one_turn, participant, measured)):
                running = [p for p in running if p is not participant]
        last_round_s = time.monotonic() - began
    return running


def _one_turn(participant: Participant, measured: bool) -> None:
    iteration = participant.turn()
    what = "warm-up"
    if measured:
        participant.iterations.append(iteration)
        what = "kept" if undisturbed([iteration]) else "discarded: others were at work"
    numbers = " ".join(f"{key} {value:.2f}" for key, value in iteration.items())
    say(f"  {participant.entry.name}: {numbers} ({what})")


def _has_work(participant: Participant, action: Callable[[], None]) -> bool:
    try:
        action()
    except (ParticipantError, BrokenPipeError) as reason:
        say(f"  {participant.entry.name} is skipped: {reason}")
        return False
    return True


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def prepare_assets(folder: Path) -> None:
    """Build models and prompts on first use."""
    if not Path("/proc/pressure/cpu").exists():
        sys.exit(
            "This kernel has no /proc/pressure/cpu, which says whether others were at work: boot it with psi=1."
        )
    if not folder.exists():
        say(f"building models and prompts in {folder}")
        subprocess.run(
            [sys.executable, str(HERE / "workload.py"), str(folder)],
            check=True,
            capture_output=True,
        )


def describe_machine(versions: dict[str, dict[str, str]]) -> list[str]:
    """What the numbers depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [
        f"{processor()}, {memory:.0f} GB, Linux {platform.release()}, Python "
        f"{platform.python_version()}; {date.today().isoformat()}, OpenPPO {commit.stdout.strip() or 'unknown'}.",
        "",
    ]
    for name, packages in versions.items():
        lines.append(
            f"- {name}: {', '.join(f'{package} {version}' for package, version in packages.items())}"
        )
    return lines


def processor() -> str:
    """The CPU's name, cores, and units that matter here."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in cpu if line.startswith("model name")),
        platform.machine(),
    )
    flags = next((line.split() for line in cpu if line.startswith("flags")), [])
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{model}, {os.cpu_count()} cores ({', '.join(units)})"


def own_versions() -> str:
    """Versions of this environment, which is OpenPPO's."""
    names = {"torch": "torch", "transformers": "transformers", "deepspeed": "DeepSpeed"}
    versions = [f"{name} {metadata.version(package)}" for package, name in names.items()]
    return ", ".join([f"Python {platform.python_version()}", *versions])


def write_results(name: str, title: str, lines: Sequence[str]) -> None:
    """A dated table in benchmarks/results."""
    file = REPOSITORY / "benchmarks" / "results" / f"{date.today().isoformat()}-{name}.md"
    words = [
        Path(word).name if word.startswith("/") else word for word in sys.argv[1:]
    ]  # not where on this machine
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    head = [
        f"- Device: {processor()}",
        f"- Versions: {own_versions()}",
    ]  # which benchmarks/tested.py reads
    text = [f"# {title}, {date.today().isoformat()}", "", *head, "", f"`{command}`", "", *lines]
    file.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    say(f"written to {file}")


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
