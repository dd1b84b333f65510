"""Stages of other functions: variants of a run, a lack of memory, the other commands. Seconds mean little here."""

import json
import os
import subprocess
import time
from pathlib import Path

from benchmarks.gpu.assets import assets_of
from benchmarks.gpu.rows import DRY, SECONDS_LEFT, WORK, Row, emit, log
from benchmarks.gpu.runs import GRPO, Run, difference, peak_and_estimate, rounded

COMPARED = (
    "reward kl policy_loss value_loss grad_norm actor_grad_norm response_length entropy".split()
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "base": (),
    "uncompiled": ("--compile", "off"),
    "unfused": ("--fused_kernels", "off"),
    "ZeRO-3": ("--zero_stage", "3"),
    "EMA": ("--ema_beta", "0.992"),
    "offload_idle": ("--offload_idle",),
    "graphs on": ("--cuda_graphs", "on"),
    "graphs off": ("--cuda_graphs", "off"),
    "ZeRO-0": ("--zero_stage", "0"),
    "LoRA": ("--lora_rank", "16"),
    "checkpointing": ("--gradient_checkpointing",),
    "GRPO": GRPO,
    "float32": ("--no_bf16",),
    "base again": (),
}
"""Those that take longest first."""
SHOWN = (
    "policy_loss",
    "value_loss",
    "rollout_log_prob_gap",
    "time/generation_s",
    "time/training_s",
)
IN_A_DRY_RUN = ("base", "GRPO")


def functions() -> None:
    """Variants of PPO on a small model, several at a time: do they run, and how far is step 1 from the base's?"""
    names, at_once = (IN_A_DRY_RUN, 1) if DRY else (tuple(VARIANTS), 5)
    assets_of("small")
    waiting = [
        Run(name, "small", "--micro_train_tokens", "8192", *VARIANTS[name], steps=2)
        for name in names
    ]
    running, firsts = list[Run](), dict[str, Row]()
    latest = time.time() + SECONDS_LEFT - 5
    while (waiting or running) and time.time() < latest:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
            running[-1].begin()
        for run in [
            run for run in running if run.process is not None and run.process.poll() is not None
        ]:
            running.remove(run)
            _show_variant(run)
            if metrics := run.metrics():
                firsts[run.name] = metrics[0]
            run.remove()
        time.sleep(0.2)
    for run in [*running, *waiting]:
        run.stop()
        emit(
            "functions",
            variant=run.name,
            failed="out of time: " + " | ".join(run.lines()[-4:])[-300:],
        )
    for name, first in firsts.items():
        if name != "base" and "base" in firsts:
            emit(
                "compared",
                variant=name,
                step_1_differs_by=difference(firsts["base"], first, COMPARED),
            )


def _show_variant(run: Run) -> None:
    assert run.process is not None
    metrics, status = run.metrics(), run.process.returncode
    row: Row = {
        "variant": run.name,
        "flags": " ".join(run.flags[2:]),
        "status": status,
        "steps": len(metrics),
    }
    if status != 0:
        row["failed"] = " | ".join(run.lines()[-8:])[-700:]
    if metrics:
        last = metrics[-1]
        row |= rounded(last, *SHOWN)
        row |= {
            f"{phase} GiB / estimate": peak_and_estimate(last, phase)
            for phase in ("generation", "training")
        }
    emit("functions", **row, wall_s=round(time.time() - run.began, 1))
    run.show_remarks()


def memory() -> None:
    """What a run prints when memory is short, and its status."""
    if DRY:
        emit("memory", what="left out: there is no GPU")
        return
    run = Run("out of memory", "small", steps=2, reward="reward.py:fill_memory")
    run.begin()
    emit("memory", what="status", value=run.wait())
    lines = [
        line for line in run.lines() if any(word in line for word in ("memory", "try", "GiB", "--"))
    ]
    for line in lines[-12:]:
        emit("memory", what="line", value=line.strip()[:300])
    log(run.name, "\n".join(run.lines()))
    run.remove()


def commands() -> None:
    """Everything else that a user starts, at the same time: statuses, and the last metrics of each."""
    folder, script = WORK / "commands", Path(__file__).with_name("commands.sh")
    environment = os.environ | {"KIT_DRY": str(int(DRY))}
    script_log = WORK / "logs" / "commands.sh.txt"
    n_shown = 0
    with open(script_log, "wb") as output:
        process = subprocess.Popen(
            ["bash", str(script), str(folder)], env=environment, stdout=output, stderr=output
        )
    while process.poll() is None:
        time.sleep(0.5)
        n_shown = _show_statuses(folder / "status.txt", n_shown)
    _show_statuses(folder / "status.txt", n_shown)
    log("commands.sh", script_log.read_text(encoding="utf-8", errors="replace")[-6000:])
    for file in sorted(folder.glob("*/logs/metrics.jsonl")):
        last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
        shown = rounded(
            last,
            "reward",
            "loss",
            "kl",
            "rollout_log_prob_gap",
            "time/generation_s",
            "time/training_s",
        )
        emit("last steps", run=file.parent.parent.name, step=last["step"], **shown)


def _show_statuses(file: Path, n_shown: int) -> int:
    """Write a row for each whole line of ``file`` after the first ``n_shown``; return the number of lines shown."""
    if not file.exists():
        return n_shown
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    for line in lines[n_shown:]:
        name, status, took = line.split()
        emit("commands", command=name, status=int(status), seconds=int(took))
    return len(lines)
