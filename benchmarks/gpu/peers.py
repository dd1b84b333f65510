"""Stage of GRPO steps of OpenPPO and TRL in turns, loaded at the same time on the same GPU."""

import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.gpu.assets import assets_of
from benchmarks.gpu.rows import DRY, WORK, Row, emit, log

SIDES = {"OpenPPO": "side_openppo", "TRL": "side_trl"}
TURNS = 3 if DRY else 4


class Side:
    """A process that has loaded everything, and makes a step for each line that it reads."""

    def __init__(self, name: str) -> None:
        self.name, self.file = name, WORK / "logs" / f"{name}.txt"
        words = [sys.executable, "-m", f"benchmarks.gpu.{SIDES[name]}"]
        folder = tempfile.mkdtemp(dir=WORK)
        words += [str(assets_of("0.5b")), folder]
        with open(self.file, "w", encoding="utf-8") as errors:
            self.process: Any = subprocess.Popen(
                words,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def answer(self, **row: Any) -> Row | None:
        """Its next row, which is written; None if it has ended."""
        line = self.process.stdout.readline()
        if not line:
            emit(
                "peers",
                side=self.name,
                **row,
                failed="it ended: " + " | ".join(self._lines()[-10:])[-900:],
            )
            return None
        answer = json.loads(line)
        shown = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in answer.items()
        }
        emit("peers", side=self.name, **row, **shown)
        return answer

    def ask(self) -> None:
        """Let it make a step."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """End it, and keep its log."""
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        log(f"peer {self.name}", "\n".join(self._lines()))

    def _lines(self) -> list[str]:
        return [line for line in self.file.read_text(encoding="utf-8").splitlines() if line.strip()]


def peers() -> None:
    """GRPO, 8 prompts x 8 responses; ratios are of medians after the first turn."""
    sides = [Side(name) for name in SIDES]
    steps: dict[str, list[Row]] = {name: [] for name in SIDES}
    try:
        alive = [side for side in sides if side.answer()]
        for turn in range(TURNS):
            for side in list(alive):
                side.ask()
                step = side.answer(turn=turn)
                if step is None:
                    alive.remove(side)
                elif turn > 0:
                    steps[side.name].append(step)
        if all(steps.values()):
            ratios = {name: _ratio(steps, name) for name in ("total", "generation", "training")}
            emit("ratios", what="TRL / OpenPPO", **ratios)
    finally:
        for side in sides:
            side.end()


def _ratio(steps: dict[str, list[Row]], name: str) -> float:
    medians = {side: statistics.median(row[name] for row in rows) for side, rows in steps.items()}
    return round(medians["TRL"] / medians["OpenPPO"], 2)
