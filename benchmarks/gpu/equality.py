"""Stages that compare runs bit for bit: two equal ones, and one that was stopped and resumed with one that was not."""

import signal
import subprocess
import time

from benchmarks.gpu.assets import assets_of
from benchmarks.gpu.rows import DRY, Row, emit, log
from benchmarks.gpu.runs import Run, difference

EXACT = () if DRY else ("--deterministic",)
"""On a GPU kernels of the backward pass add in any order without it; CPUs are exact."""
FLAGS = ("--micro_train_tokens", "8192")
TIMED = ("time", "speed/", "memory/", "agent/")


def equal_runs() -> None:
    """Two equal runs of four steps, plain and with --deterministic: do they agree, and what does it cost?"""
    assets_of("small")
    pairs = {"plain": (), "deterministic": EXACT}
    runs = {
        name: [Run(f"{name} {number}", "small", *FLAGS, *flags, steps=4) for number in (1, 2)]
        for name, flags in pairs.items()
    }
    every = [run for pair in runs.values() for run in pair]
    for run in every:
        run.begin()
    for run in every:
        _show_end(run)
    for one, other in runs.values():
        _compare(one, other)
    for run in every:
        run.remove()


def resume() -> None:
    """Six steps at once, and two, SIGTERM and a resumed run: do all metrics agree?"""
    assets_of("small")
    whole, parts = (
        Run(f"resume {name}", "small", *FLAGS, *EXACT, steps=6) for name in ("whole", "parts")
    )
    for run in (parts, whole):
        run.begin()
    parts.wait(2)
    assert parts.process is not None
    parts.process.send_signal(signal.SIGTERM)  # which alone makes a checkpoint here
    began = time.time()
    try:
        status = f"status {parts.process.wait(60)} after {time.time() - began:.1f} s"
    except subprocess.TimeoutExpired:
        parts.stop()
        status = "killed after 60 s"
    n_bytes = sum(
        file.stat().st_size for file in parts.folder.rglob("step_*/**/*") if file.is_file()
    )
    emit(
        "resume", what="SIGTERM after two steps", value=f"{status} and {len(parts.metrics())} steps"
    )
    emit("resume", what="checkpoint, GiB", value=round(n_bytes / 2**30, 2))
    parts.begin("--load_checkpoint")
    for run in (parts, whole):
        _show_end(run)
    _compare(whole, parts)
    for run in (whole, parts):
        run.remove()


def _show_end(run: Run) -> None:
    status = run.wait()
    row: Row = {"status": status, "steps": len(run.metrics())}
    row |= {"training s": [round(metrics["time/training_s"], 3) for metrics in run.metrics()]}
    if status != 0:
        row["failed"] = " | ".join(run.lines()[-6:])[-600:]
    emit("ends", run=run.name, **row)
    log(run.name, "\n".join(run.lines()), 5000)


def _compare(one: Run, other: Run) -> None:
    """Write a row for each step that both made."""
    by_step = [{row["step"]: row for row in run.metrics()} for run in (one, other)]
    for step in sorted(by_step[0].keys() & by_step[1].keys()):
        ours, theirs = (rows[step] for rows in by_step)
        names = [
            name
            for name, value in ours.items()
            if isinstance(value, int | float) and not name.startswith(TIMED)
        ]
        unequal = [name for name in names if ours[name] != theirs.get(name)]
        row = {"differ by": difference(ours, theirs, names), "metrics that differ": len(unequal)}
        emit(
            "compared",
            run=one.name,
            beside=other.name,
            step=step,
            **row,
            first=" ".join(unequal[:6]),
        )
