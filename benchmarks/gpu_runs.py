"""Short runs of train_ppo with other flags, as users start them. Steps of ``gpu_first_hour.sh``.

    python benchmarks/gpu_runs.py start|mfu|large|faults|ranks [--shape 0.5b] [--json FILE]

start: launched and recorded decode steps, float32, ZeRO-3, the average, moments on the host. mfu: micro-batches, with
and without checkpointing and compiled layers. large: a 7B model. faults: resume bit for bit, SIGTERM, kill -9, lack of
memory. ranks: two processes under ZeRO 2 and 3 beside one. ``--shape tiny`` runs on a CPU, to show that it works.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gpu import model_size
from gpu_probe import ON_GPU, Row, report
from peers.gpu_models import SHAPES, Shape, build
from peers.interleave import CACHE, REPOSITORY
from peers.measure import training_flops

REWARD = """import torch

def reward_fn(response):
    return float(len(response) % 7)

held = []
def fill_memory(response):
    if not held:  # then training has 100 MB
        held.append(torch.empty(torch.cuda.mem_get_info()[0] - 10**8, dtype=torch.uint8, device="cuda"))
    return float(len(response) % 7)
"""
COMPARED = ("reward", "kl", "policy_loss", "value_loss", "grad_norm", "response_length")
GRAPHS = ["--cuda_graphs", "on"] if ON_GPU else []
RUNS: dict[str, dict[str, list[str]]] = {
    "start": {
        "launched": ["--cuda_graphs", "off"],
        "recorded": GRAPHS,
        "profiled": [*GRAPHS, "--profile_steps", "2"],
        "float32": [*GRAPHS, "--no_bf16"],
        "ZeRO 3": [*GRAPHS, "--zero_stage", "3"],
        "average": [*GRAPHS, "--enable_ema"],
        "moments on the host": [*GRAPHS, "--offload_idle"],
    },
    "mfu": {
        **{f"micro {n}": [*GRAPHS, "--micro_train_batch_size", str(n)] for n in (4, 8, 16)},
        "16k tokens": [*GRAPHS, "--micro_train_tokens", "16384", "--micro_rollout_tokens", "16384"],
        "micro 8, checkpointing": [*GRAPHS, "--micro_train_batch_size", "8", "--gradient_checkpointing"],
        "micro 8, compiled": [*GRAPHS, "--micro_train_batch_size", "8", *(["--compile"] if ON_GPU else [])],
    },
    "large": {
        "LoRA": [*GRAPHS, "--lora_rank", "16", "--gradient_checkpointing", "--micro_train_batch_size", "4"],
        "full, rloo": [
            *(*GRAPHS, "--gradient_checkpointing", "--micro_train_batch_size", "2", "--init_kl_coef", "0"),
            *("--advantage_estimator", "rloo", "--n_samples_per_prompt", "2"),
        ],
    },
    "ranks": {
        "one": [],
        "two, ZeRO 2": ["2", "--zero_stage", "2"],
        "two, ZeRO 2, overlapped": ["2", "--zero_stage", "2", "--overlap_comm"],
        "two, ZeRO 3": ["2", "--zero_stage", "3"],
    },
}
"""Flags by name; a number first is that of ranks."""


class Run:
    """One train_ppo in a folder of its own."""

    def __init__(self, folder: Path, assets: Path, shape: Shape, flags: Sequence[str], steps: int = 2) -> None:
        self.folder, n_ranks = folder, "1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        if flags and flags[0].isdigit():
            n_ranks, *flags = flags
        samples = shape.n_responses
        prompts = samples // (int(flags[flags.index("--n_samples_per_prompt") + 1]) if "rloo" in flags else 1)
        self.words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n_ranks]
        self.words = [*(self.words if n_ranks != "1" else [sys.executable]), "-m", "openppo.cli.train_ppo"]
        given = {
            "pretrain": assets / "policy",
            "prompt_data": assets / "prompts.jsonl",
            "input_key": "input",
            "reward_fn": "reward.py",
            "prompt_max_len": shape.prompt,
            "generate_max_len": shape.response,
            "rollout_batch_size": prompts,
            "train_batch_size": samples,
            "num_episodes": 1000,
            "max_steps": steps,
            "save_path": "model",
        }
        self.words += [word for name, value in given.items() for word in (f"--{name}", str(value))]
        self.words += ["--bf16", *flags]

    def begin(self, *more: str) -> subprocess.Popen[str]:
        """Start it; its output goes to a file."""
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        with open(self.folder / "output.txt", "a", encoding="utf-8") as output:
            return subprocess.Popen(
                [*self.words, *more], cwd=self.folder, env=environment, stdout=output, stderr=output, text=True
            )

    def to_end(self, *more: str, status: int | None = 0) -> list[Row]:
        """The metrics of its steps; ``status`` None takes any."""
        ended = self.begin(*more).wait()
        if status is not None and ended != status:
            raise RuntimeError(f"{' '.join(self.words)} ended with {ended}:\n{self.said()[-3000:]}")
        return self.metrics()

    def metrics(self) -> list[Row]:
        """Those written so far."""
        file = self.folder / "model" / "logs" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def said(self) -> str:
        """All output."""
        return (self.folder / "output.txt").read_text(errors="replace")


def summary(name: str, rows: list[Row], first: list[Row], shape: Shape, flags: Sequence[str], peak: float) -> Row:
    """Medians after the first step, MFU, peaks beside estimates, and how far metrics of step 1 are from ``first``."""
    later = rows[1:] or rows
    took = {
        key: statistics.median(row[f"time/{key}_s"] for row in later)
        for key in ("generation", "experience", "training", "step")
    }
    adapters = 0 if "--lora_rank" not in flags else 16 * sum(shape_adapter(shape))
    flops = training_flops(model_size(shape), shape.prompt, shape.response, adapters)
    if "rloo" not in flags:
        flops += training_flops(model_size(shape), shape.prompt, shape.response, adapters, has_head=False)
    shown: Row = {"run": name} | {f"{key} s": round(value, 2) for key, value in took.items()}
    shown["MFU"] = f"{shape.n_responses * flops / took['training'] / peak / 1e12:.1%}"
    for phase in ("generation", "training"):
        pair = (rows[-1].get(f"memory/{phase}_{what}_gib") for what in ("peak", "estimated"))
        shown[f"{phase} GiB, estimate"] = " / ".join("-" if gib is None else f"{gib:.1f}" for gib in pair)
    gap = rows[0].get("rollout_log_prob_gap")
    shown["log-prob gap"] = "-" if gap is None else f"{gap:.2g}"
    return shown | {"differs by": f"{difference(rows[:1], first[:1], COMPARED):.1e}"}


def shape_adapter(shape: Shape) -> Iterator[int]:
    """LoRA's parameters of rank 1, layer by layer: inputs and outputs of its linear layers."""
    kv = shape.hidden // shape.heads * shape.kv_heads
    for _ in range(shape.layers):
        yield 4 * shape.hidden + 2 * (shape.hidden + kv) + 3 * (shape.hidden + shape.intermediate)


def difference(ones: list[Row], others: list[Row], names: Sequence[str] = ()) -> float:
    """The largest of metrics, relative to those above 1; of all but times and memory without ``names``."""
    largest = 0.0
    for one, other in zip(ones, others, strict=True):
        for key in names or [k for k in one if not k.startswith(("time", "speed/", "memory/", "agent/"))]:
            left, right = one.get(key), other.get(key)
            if isinstance(left, int | float) and isinstance(right, int | float):
                largest = max(largest, abs(left - right) / max(1.0, abs(left)))
    return largest


def group(arguments: argparse.Namespace, assets: Path, shape: Shape, folder: Path) -> Iterator[Row]:
    """One row for each run of a group; one that fails is a row too."""
    first: list[Row] = []
    for number, (name, flags) in enumerate(RUNS[arguments.group].items()):
        if flags and flags[0].isdigit() and ON_GPU and torch.cuda.device_count() < int(flags[0]):
            yield {"run": name, "what": "left out: it needs two GPUs"}
            continue
        run = Run(folder / str(number), assets, shape, flags)
        try:
            rows = run.to_end()
        except RuntimeError:
            lines = [line for line in run.said().splitlines() if line.strip()]
            yield {"run": name, "what": "failed: " + " ".join(lines[-8:])[-600:]}
            continue
        first = first or rows
        yield summary(name, rows, first, shape, flags, arguments.peak_tflops)


def faults(arguments: argparse.Namespace, assets: Path, shape: Shape, folder: Path) -> Iterator[Row]:
    """What a run does when it is stopped, killed or out of memory, and whether it resumes as if nothing had been."""
    every = ["--save_steps", "1", *GRAPHS]
    whole = Run(folder / "whole", assets, shape, every, steps=4).to_end()
    parts = Run(folder / "parts", assets, shape, every, steps=4)
    parts.words[parts.words.index("--max_steps") + 1] = "4"
    process = parts.begin()
    _wait_for_steps(parts, process, 2)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    status = process.wait()
    yield {"what": "SIGTERM after two steps", "found": f"ended with {status} after {time.monotonic() - began:.0f} s"}
    resumed = parts.to_end("--load_checkpoint")
    by_step = {row["step"]: row for row in resumed}
    gap = difference([by_step[row["step"]] for row in whole], whole)
    yield {"what": "metrics of 4 steps and of those resumed", "found": f"differ by {gap:.1e}"}
    sizes = [file.stat().st_size for file in (folder / "whole").rglob("step_*/**/*") if file.is_file()]
    yield {"what": "checkpoints on disk", "found": f"{sum(sizes) / 2**30:.2f} GiB"}
    killed = Run(folder / "killed", assets, shape, every, steps=3)
    process = killed.begin()
    _wait_for_steps(killed, process, 1)
    process.kill()
    process.wait()
    found = killed.to_end("--load_checkpoint")
    yield {"what": "kill -9 after a step, then resumed", "found": f"ends with step {found[-1]['step']}"}
    if ON_GPU:
        full = Run(folder / "full", assets, shape, [*GRAPHS, "--reward_fn", "reward.py:fill_memory"])
        full.to_end(status=None)
        lines = [line for line in full.said().splitlines() if "memory" in line or "try:" in line]
        yield {"what": "out of memory", "found": " ".join(lines)[-800:]}


def _wait_for_steps(run: Run, process: subprocess.Popen[str], n: int) -> None:
    while len(run.metrics()) < n:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode} before step {n}:\n{run.said()[-3000:]}")
        time.sleep(0.1)


def main() -> None:
    """Parse the command line and run a group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=[*RUNS, "faults"])
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="dense bf16; default: H200")
    parser.add_argument("--cache", type=Path, default=CACHE / "gpu", help="models, built on first use")
    parser.add_argument("--json", type=Path, help="where the rows are kept, too")
    arguments = parser.parse_args()
    if arguments.shape != "tiny" and not ON_GPU:
        parser.error("there is no GPU: only --shape tiny runs on a CPU")
    shape, assets = SHAPES[arguments.shape], arguments.cache.resolve() / arguments.shape
    if not assets.exists():
        build(shape, assets)
    rows = faults if arguments.group == "faults" else group
    with tempfile.TemporaryDirectory() as folder:
        report(rows(arguments, assets, shape, Path(folder)), arguments.json)


if __name__ == "__main__":
    main()
