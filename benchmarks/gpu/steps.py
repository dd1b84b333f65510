"""Stages of whole steps: PPO as it is, with decode steps launched, profiled; a 7B model."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import OUT, Row, attempt, emit, findings
from benchmarks.gpu.runs import GRPO, PHASES, Run

LARGEST_TRACE = 14 * 2**20
"""Bytes of a trace that travels back."""


def ppo() -> None:
    """Three PPO steps with the defaults."""
    _run("PPO")


def launched() -> None:
    """Two steps with decode steps that are launched one by one."""
    _run("PPO, --cuda_graphs off", "--cuda_graphs", "off", steps=2)


def large() -> None:
    """Two GRPO steps of 7B with LoRA: decoding against the bandwidth, peaks against the estimate."""
    _run(
        "GRPO, 7B LoRA", "--lora_rank", "16", "--gradient_checkpointing", *GRPO, steps=2, model="7b"
    )


def _run(name: str, *flags: str, steps: int = 3, model: str = "0.5b") -> None:
    run = Run(name, model, *flags, steps=steps)
    run.to_end()
    run.remove()


def large_full() -> None:
    """The estimate of 7B in full, which is near the memory of one GPU; nothing is loaded."""
    _run(
        "GRPO, 7B full, estimate",
        "--gradient_checkpointing",
        *GRPO,
        "--dry_run",
        steps=1,
        model="7b",
    )


def profile() -> None:
    """The longest kernels of each phase of one step, from --profile_steps."""
    run = Run("PPO, profiled", "0.5b", "--profile_steps", "2", steps=2)
    run.to_end()
    traces = sorted(
        (run.folder / "model" / "logs" / "profile").glob("*.json.gz")
    )  # of the rollout and of training
    if not traces:
        emit("kernels", failed="no trace")
    for number, trace in enumerate(traces, 1):
        if trace.stat().st_size < LARGEST_TRACE:
            shutil.copy(trace, OUT / f"trace-{number}.json.gz")
        attempt("kernels", lambda trace=trace: read_trace(trace), trace=trace.name)
    run.remove()


def read_trace(trace: Path) -> None:
    """Write rows of each phase, and of its longest kernels: those that began while the phase ran on the CPU."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    on_gpu = findings()["device"] != "CPU"
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    kernels = [event for event in events if event.get("cat") in kinds and "dur" in event]
    for event in events:
        if event.get("cat") in ("user_annotation", "cpu_op") and event.get("name") in PHASES:
            _show_phase(event, kernels)


def _show_phase(phase: dict[str, Any], kernels: list[Row]) -> None:
    start, end = phase["ts"], phase["ts"] + phase["dur"]
    inside = [kernel for kernel in kernels if start <= kernel["ts"] < end]
    total_ms, calls = Counter[str](), Counter(kernel["name"] for kernel in inside)
    for kernel in inside:
        total_ms[kernel["name"]] += kernel["dur"] / 1e3
    busy = total_ms.total()
    emit(
        "phases",
        phase=phase["name"],
        ms=round(phase["dur"] / 1e3, 1),
        busy_ms=round(busy, 1),
        kernels=len(inside),
    )
    for name, ms in total_ms.most_common(10):
        row = {"ms": round(ms, 2), "calls": calls[name], "share": f"{ms / max(busy, 1e-9):.1%}"}
        emit("kernels", phase=phase["name"], kernel=name[:110], **row)
