"""Runs the stages one after another within a budget of seconds, and keeps tables.md up to date. Called by run.sh.

A stage that does not fit into what is left by its estimate is left out, and a smaller one behind it may run; one that
outlasts its limit is ended with all that it has started.
"""

import argparse
import os
import pkgutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import BEGAN, DRY, OUT, REPOSITORY, WORK, findings, log, write_tables

SECONDS_IN_A_DRY_RUN = 400


@dataclass(frozen=True)
class Stage:
    """A function of this folder, its seconds on an H200 (27 November 2026), and its limit."""

    function: str
    seconds: int
    limit: int


STAGES = {
    "environment": Stage("device:environment", seconds=14, limit=70),
    "assets": Stage("assets:assets", seconds=8, limit=60),
    "ppo": Stage("steps:ppo", seconds=22, limit=110),
    "tests": Stage("device:tests", seconds=60, limit=110),
    "peers": Stage("peers:peers", seconds=44, limit=130),
    "parts": Stage("parts:parts", seconds=80, limit=140),
    "profile": Stage("steps:profile", seconds=41, limit=100),
    "large": Stage("steps:large", seconds=50, limit=170),
    "launched": Stage("steps:launched", seconds=29, limit=80),
    "functions": Stage("functions:functions", seconds=58, limit=150),
    "resume": Stage("equality:resume", seconds=37, limit=110),
    "memory": Stage("functions:memory", seconds=12, limit=90),
    "large-full": Stage("steps:large_full", seconds=9, limit=60),
    "equal-runs": Stage("equality:equal_runs", seconds=35, limit=110),
    "commands": Stage("functions:commands", seconds=75, limit=120),
}
"""In the order of their value."""


def descendants(pid: int) -> list[int]:
    """Processes that it has started, also those in sessions of their own, from /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):  # it has ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    pids, waiting = list[int](), [pid]
    while waiting:
        started = children.get(waiting.pop(), [])
        pids += started
        waiting += started
    return pids


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a stage and all that it has started: by SIGTERM, after 4 seconds by SIGKILL."""
    pids = {process.pid, *descendants(process.pid)}
    for number, patience in ((signal.SIGTERM, 4.0), (signal.SIGKILL, 2.0)):
        pids |= set(descendants(process.pid))
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, number)
        latest = time.time() + patience
        while time.time() < latest and (process.poll() is None or any(map(is_running, pids))):
            time.sleep(0.1)


def is_running(pid: int) -> bool:
    """True for a process that has not ended; one that nobody has waited for yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


class Plan:
    """The stages of one call, and how each of them went."""

    def __init__(self, names: list[str], budget: float) -> None:
        self.names, self.budget = names, budget
        self.states: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Run all that fit."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        for name in self.names:
            stage, left = STAGES[name], self.budget - (time.time() - BEGAN)
            if left < stage.seconds and not DRY:
                self.states[name] = (
                    f"left out: {left:.0f} s are left, and it takes about {stage.seconds}"
                )
            else:
                limit = SECONDS_IN_A_DRY_RUN if DRY else int(min(stage.limit, max(left, 20)))
                print(
                    f"== {name}: about {stage.seconds} s, at most {limit}; {left:.0f} s are left",
                    flush=True,
                )
                self._run_stage(name, limit)
                print(f"-- {name}: {self.states[name]}", flush=True)
            write_tables(self.states)

    def _run_stage(self, name: str, limit: int) -> None:
        began, file = time.time(), WORK / "logs" / f"{name}.txt"
        environment = os.environ | {"KIT_LIMIT": str(limit - 3), "KIT_STAGE": name}
        words = [sys.executable, "-u", "-m", "benchmarks.gpu.plan", "--stage", name]
        with open(file, "wb") as output:
            process = subprocess.Popen(
                words,
                cwd=REPOSITORY,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.process, self.states[name] = process, "running"
        while process.poll() is None and time.time() - began < limit:
            write_tables(self.states)
            time.sleep(0.5)

        is_cut = process.poll() is None
        if is_cut:
            end(process)
        with suppress(ProcessLookupError):  # of a stage that failed, runs may be left
            os.killpg(process.pid, signal.SIGKILL)
        self.process = None
        verdict = "ended" if process.poll() == 0 else f"FAILED, status {process.poll()},"
        if is_cut:
            verdict = "cut at its limit"
        self.states[name] = f"{verdict} after {time.time() - began:.0f} s"
        if verdict != "ended":
            text = file.read_text(encoding="utf-8", errors="replace")
            log(f"stage {name}, {self.states[name]}", text, 6000)
            print("\n".join(text.splitlines()[-12:]), flush=True)

    def _end(self, *_: Any) -> None:
        if self.process is not None:
            end(self.process)
        write_tables(self.states | {"(ended by a signal)": f"after {time.time() - BEGAN:.0f} s"})
        os._exit(1)


def main() -> None:
    """Parse the command line; run a plan, or one stage of it in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=float, default=480, help="seconds since the start of run.sh"
    )
    parser.add_argument("--stage", choices=list(STAGES), help="run it here")
    parser.add_argument("stages", nargs="*", help="default: all")
    arguments = parser.parse_args()
    if arguments.stage:
        pkgutil.resolve_name(f"benchmarks.gpu.{STAGES[arguments.stage].function}")()
        return
    if unknown := [name for name in arguments.stages if name not in STAGES]:
        parser.error(f"there is no stage {' '.join(unknown)}: name some of {' '.join(STAGES)}")
    names = arguments.stages or list(STAGES)
    if names[0] != "environment" and not findings():
        names = ["environment", *names]  # later stages need what it finds
    Plan(names, arguments.budget).run()
    print((OUT / "tables.md").read_text(encoding="utf-8")[-9500:], flush=True)


if __name__ == "__main__":
    main()
