"""Runs of train_ppo as users start them; a row of each step is written when the step ends."""

import json
import re
import shutil
import subprocess
import sys
import time

from benchmarks.gpu.assets import adapter_entries, assets_of, model_size, scratch, shape_of
from benchmarks.gpu.rows import (
    DRY,
    OUT,
    PEAK_TFLOPS,
    SECONDS_LEFT,
    Row,
    attempt,
    bandwidths,
    emit,
    log,
    read_rows,
)
from benchmarks.peers.measure import decode_bytes, training_flops

PHASES = ("generation", "experience", "training")
GRPO = (
    "--advantage_estimator",
    "group_norm",
    "--n_samples_per_prompt",
    "2" if DRY else "8",
    "--init_kl_coef",
    "0",
)
REWARD = """import torch

def reward_fn(response):
    return float(len(response) % 7)

held = []
def fill_memory(response):
    if not held:  # then training has 100 MB
        held.append(torch.empty(torch.cuda.mem_get_info()[0] - 10**8, dtype=torch.uint8, device="cuda"))
    return float(len(response) % 7)
"""
REMARKS = re.compile(
    r"estimated memory|peak in|the highest|micro-batches by|one by one|take a mask|are padded|merged|fits too|warn",
    re.I,
)
"""Lines of a log that say how a run ran."""
_COUNTED = (
    "rollout_log_prob_gap",
    "rollout_log_prob_gap_max",
    "kl",
    "grad_norm",
    "actor_grad_norm",
    "skipped_steps",
)


class Run:
    """One train_ppo in a folder of its own."""

    def __init__(
        self, name: str, model: str, *flags: str, steps: int = 3, reward: str = "reward.py"
    ) -> None:
        self.name, self.shape, self.flags = name, shape_of(model), flags
        self.folder = scratch(6) / "runs" / re.sub(r"\W+", "-", name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        (self.folder / "reward.py").write_text(REWARD, encoding="utf-8")
        assets, n_samples = assets_of(model), int(self.flag("--n_samples_per_prompt", "1"))
        options = {
            "pretrain": assets / "policy",
            "prompt_data": assets / "prompts.jsonl",
            "input_key": "input",
            "reward_fn": reward,
            "prompt_max_len": self.shape.prompt,
            "generate_max_len": self.shape.response,
            "rollout_batch_size": self.shape.n_responses // n_samples,
            "train_batch_size": self.shape.n_responses,
            "num_episodes": 1000,
            "max_steps": steps,
            "save_path": "model",
            "save_steps": 0,
        }
        self.words = [sys.executable, "-m", "openppo.cli.train_ppo"]
        self.words += [
            word for name, value in options.items() for word in (f"--{name}", str(value))
        ]
        self.words += ["--bf16", *flags]
        self.process: subprocess.Popen[bytes] | None = None
        self.n_shown, self.began = 0, time.time()

    def flag(self, name: str, default: str) -> str:
        """The value of one of ``flags``."""
        return self.flags[self.flags.index(name) + 1] if name in self.flags else default

    def begin(self, *more: str) -> None:
        """Start it; its output goes to a file."""
        self.began = time.time()
        with open(self.folder / "output.txt", "ab") as output:
            self.process = subprocess.Popen(
                [*self.words, *more], cwd=self.folder, stdout=output, stderr=output
            )

    def metrics(self) -> list[Row]:
        """Metrics of the steps so far."""
        return read_rows(self.folder / "model" / "logs" / "metrics.jsonl")

    def lines(self) -> list[str]:
        """The lines of its output so far."""
        file = self.folder / "output.txt"
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        return [line for line in text.splitlines() if line.strip()]

    def show_new_steps(self) -> None:
        """Write a row for each new step, and its metrics whole."""
        for metrics in self.metrics()[self.n_shown :]:
            if self.n_shown == 0:
                emit(
                    "starts",
                    run=self.name,
                    seconds_to_end_of_step_1=round(time.time() - self.began, 1),
                )
            self.n_shown += 1
            with open(OUT / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"run": self.name} | metrics) + "\n")
            emit("steps", **step_row(self, metrics))

    def wait(self, n_steps: int | None = None, limit: float = SECONDS_LEFT) -> int | None:
        """Wait until it ends, or has made so many steps; its status."""
        assert self.process is not None
        latest = time.time() + limit
        while self.process.poll() is None and time.time() < latest:
            if n_steps is not None and len(self.metrics()) >= n_steps:
                break
            self.show_new_steps()
            time.sleep(0.25)
        self.show_new_steps()
        if time.time() >= latest:
            self.stop()
        return self.process.poll()

    def stop(self) -> None:
        """End it at once, if it is still running."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def to_end(self) -> None:
        """Run all of it: rows of its steps, of remarks in its log, and of its failure."""
        self.begin()
        status = self.wait()
        if status != 0:
            emit(
                "runs",
                run=self.name,
                failed=f"status {status}: " + " | ".join(self.lines()[-10:])[-900:],
            )
        self.show_remarks()

    def show_remarks(self) -> None:
        """Write rows of what its log says of how it ran, and keep the log."""
        for line in self.lines():
            if REMARKS.search(line):
                emit("log lines", run=self.name, line=line.strip()[:300])
        log(self.name, "\n".join(self.lines()))

    def remove(self) -> None:
        """Free the gigabytes of its folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def step_row(run: Run, metrics: Row) -> Row:
    """What a table shows of a step."""
    row: Row = {"run": run.name, "step": metrics["step"]}
    for phase in ("generation", "scoring", "experience", "training", "step"):
        if (took := metrics.get(f"time/{phase}_s")) is not None:
            row[f"{phase} s"] = round(took, 3)
    rates = attempt("steps", lambda: rates_of(run, metrics), run=run.name) or {}
    row |= {name: round(value, 1 if value > 10 else 3) for name, value in rates.items()}
    row |= {
        f"{phase} GiB / estimate": pair
        for phase in PHASES
        if (pair := peak_and_estimate(metrics, phase))
    }
    return row | rounded(metrics, *_COUNTED, "response_length")


def rates_of(run: Run, metrics: Row) -> dict[str, float]:
    """Tokens/s, MFU, and the shares of the memory's bandwidth that decoding reaches."""
    shape, size = run.shape, model_size(run.shape)
    adapters = adapter_entries(shape, int(run.flag("--lora_rank", "0")))
    flops = training_flops(size, shape.prompt, shape.response, adapters)
    if "--advantage_estimator" not in run.flags:
        flops += training_flops(size, shape.prompt, shape.response, adapters, has_head=False)
    read = decode_bytes(size, shape.n_responses, shape.prompt, shape.response)
    generation, training = metrics["time/generation_s"], metrics["time/training_s"]
    tb_s = read / generation / 1e12
    return {
        "tokens/s": shape.n_responses * metrics["response_length"] / generation,
        "MFU %": 100 * shape.n_responses * flops / training / PEAK_TFLOPS / 1e12,
        **{f"% of {name}": 100 * tb_s / most for name, most in bandwidths().items()},
    }


def peak_and_estimate(metrics: Row, phase: str) -> str | None:
    """GiB of a phase, measured and estimated; None on a CPU."""
    peak, estimate = (metrics.get(f"memory/{phase}_{name}_gib") for name in ("peak", "estimated"))
    return None if peak is None or estimate is None else f"{peak:.2f} / {estimate:.2f}"


def rounded(metrics: Row, *names: str) -> Row:
    """Those of the metrics that there are, to four digits."""
    return {name: float(f"{metrics[name]:.4g}") for name in names if name in metrics}


def difference(one: Row, other: Row, names: list[str]) -> float:
    """The largest of the metrics' differences, relative to those above 1."""
    gaps = [
        abs(one[name] - other[name]) / max(1.0, abs(one[name]))
        for name in names
        if name in one and name in other
    ]
    return float(f"{max(gaps, default=float('nan')):.2g}")
