"""A participant's side of an interleaved benchmark: load everything, then do one iteration for each line on stdin.

Runs in every participant's environment, so it needs the standard library only. ``interleave.py`` is the other side.
What a library prints goes to stderr; stdout carries one JSON object per line: ``ready`` or ``skip`` once, an iteration
for each line on stdin, and ``peak_mb`` at the end of stdin.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

NEW_TOKENS = {"w1": 128, "w2": 256, "w3": 64, "w4": 128, "w5": 24}
PROMPT_TOKENS = {"w3": 256, "w4": 64}
"""Of the workloads with groups of random tokens; W5 asks a chat model for sums."""
GROUP = 8
BATCH = 64
MICRO_TRAIN_BATCH = 8


def options(description: str | None) -> argparse.ArgumentParser:
    """What every participant is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--assets", type=Path, required=True, help="the folder that workload.py wrote"
    )
    parser.add_argument("--chat_model", default="", help="name or folder of the chat model of W5")
    parser.add_argument("--workload", choices=sorted(NEW_TOKENS), default="w1")
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument(
        "--kl", type=float, default=0.0, help="coefficient of the KL loss where there are groups"
    )
    return parser


def group_prompts(workload: str) -> list[str]:
    """Prompts of a workload with groups, as text: random words, or for W5 questions that a chat begins with."""
    choose = random.Random(3)
    if workload == "w5":
        pairs = [(choose.randint(10, 99), choose.randint(10, 99)) for _ in range(512)]
        return [f"What is {a} + {b}? Answer with the number only." for a, b in pairs]
    return [
        " ".join(f"w{choose.randrange(4, 4096)}" for _ in range(PROMPT_TOKENS[workload]))
        for _ in range(512)
    ]


def policy(arguments: argparse.Namespace) -> str:
    """Name or folder of the model that a workload with groups trains."""
    if arguments.workload == "w5":
        return arguments.chat_model
    return str(arguments.assets / "w1" / "policy")


def use_threads() -> None:
    """As many threads as ``OMP_NUM_THREADS`` says; libraries may have chosen others while they were loaded."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def disturbance() -> float:
    """Seconds so far in which some thread that could run had to wait for a CPU, and in which the host took one away.

    Two threads on two cores do not wait for each other: it grows when other processes are at work.
    """
    pressure = Path("/proc/pressure/cpu").read_text(
        encoding="utf-8"
    )  # some avg10=... total=MICROSECONDS
    waited = int(pressure.splitlines()[0].rsplit("total=", 1)[1]) / 1e6
    counters = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return waited + int(counters[8]) / os.sysconf(
        "SC_CLK_TCK"
    )  # cpu user nice system idle iowait irq softirq steal


def peak_megabytes() -> float:
    """The largest resident set of this process so far, in units of 1e6 bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


class Turns:
    """The lines on stdin, and the clock between a line and the report that answers it."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print must not be taken for an answer
        self._start = self._disturbed = 0.0

    def ready(self, **versions: str) -> None:
        """Everything is loaded."""
        self._say({"ready": versions})

    def skip(self, reason: str) -> NoReturn:
        """This participant cannot take part."""
        self._say({"skip": reason})
        sys.exit(0)

    def wait(self) -> bool:
        """Wait for the next turn and start the clock; False when there is none left."""
        if not sys.stdin.readline():
            self._say({"peak_mb": peak_megabytes()})
            return False
        self._start, self._disturbed = time.perf_counter(), disturbance()
        return True

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while self.wait():
            yield turn
            turn += 1

    def report(self, **numbers: float) -> None:
        """Stop the clock and answer: ``total`` in seconds, ``stall`` as a share of it, and ``numbers``."""
        total = time.perf_counter() - self._start
        self._say({"total": total, "stall": (disturbance() - self._disturbed) / total} | numbers)

    def _say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
