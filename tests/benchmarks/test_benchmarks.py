"""Each script of the benchmarks starts; a tiny case runs; what the tables are made of is counted right."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fork_server import Launcher

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = ["agents", "async", "cpu_peers", "decode", "gpu", "gpu_probe", "gpu_runs", "sweep"]
PARTICIPANTS = ["openppo_step", "trl_step", "openrlhf_step", "local_decode", "vllm_decode", "workload"]
PARTICIPANTS += ["gpu_models", "gpu_step"]
SWEEP = "sweep.py --workloads w2 --sizes 4 8 --repeat 1 --assets a", 2
ASYNC = "async.py --waits 0.02 --turns 2 --groups 2 --steps 1 --repeat 1", 5

measure = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "peers/measure.py")))


@pytest.mark.parametrize("script", [*COMMANDS, *(f"peers/{name}" for name in PARTICIPANTS)])
def test_help_answers(launcher: Launcher, script: str) -> None:
    ended = launcher.run([BENCHMARKS / f"{script}.py", "--help"], cwd=Path("/"))
    assert (ended.returncode, "usage" in ended.stdout) == (0, True), ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows"),
    [("gpu.py --shape tiny --steps 1 --cache .", 8), SWEEP, ASYNC],
    ids=lambda value: str(value).split(".")[0],
)
def test_a_tiny_case_runs_on_a_cpu(command: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script, *more = command.split()
    words = [sys.executable, str(BENCHMARKS / script), *more]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(re.findall(r"^\| (?:\w+, tiny|[48] |.* rank.* \|)", ended.stdout, re.MULTILINE)) == rows


@pytest.mark.slow
def test_the_first_hour_on_a_gpu_runs_dry(tmp_path: Path) -> None:
    steps = ["environment", "sdpa", "decode", "faults", "ranks"]
    words = ["bash", str(BENCHMARKS / "gpu_first_hour.sh"), "--dry", "--out", str(tmp_path), *steps]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (file,) = tmp_path.glob("*-gpu-first-hour-cpu.json")
    found = json.loads(file.read_text())["steps"]
    assert {name: step["status"] for name, step in found.items()} == dict.fromkeys(steps, 0)
    assert all(step["rows"] and "failed" not in str(step["rows"]) for step in found.values())
    page = file.with_suffix(".md").read_text()
    assert all(f"## {name}" in page for name in steps) and str(BENCHMARKS.parent) not in page


def test_disturbed_iterations_do_not_count_and_ratios_are_of_medians() -> None:
    def summary(name: str, *totals: float, stall: float = 0.8, share: float) -> Any:
        times = [{"total": t, "generation": share * t, "experience": 0.001, "training": t - share * t} for t in totals]
        stalls = [stall if i == 1 else 0.0 for i in range(len(times))]
        iterations = [{**t, "tokens": 1e3, "others": 0.9, "stall": s} for t, s in zip(times, stalls, strict=True)]
        return measure.summarize(name, iterations, 1.0)

    ours, theirs = summary("OpenPPO", 9.0, 90.0, 11.0, share=0.2), summary("TRL 1.12.0", 13.0, share=0.6)
    assert (ours.medians["total"], ours.n_kept, ours.n_discarded) == (10.0, 2, 1)
    row = next(line for line in measure.ratio_table("W1 float32", [ours, theirs]) if "TRL 1.12.0 / OpenPPO" in line)
    # 13 / 10; generation 7.8 / 2; experience 0.001 / 0.001; training 5.2 / 8
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["1.30", "3.90", "1.00", "0.65", ">= 1.3", "yes"]


@pytest.mark.parametrize("tokens", [16, 400])
def test_operations_of_training_are_those_that_torch_counts(tokens: int) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, **heads)), torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    size = measure.ModelSize(layers=6, hidden=64, heads_width=64, kv_width=32, intermediate=256, vocabulary=512)
    # with all tokens as response there are logits for all; torch's eager attention computes the other half too
    mine = measure.training_flops(size, 0, tokens, 0) + 6 * 6 * 64 * tokens**2
    assert mine == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measuring peaks needs Linux's /proc")
@pytest.mark.parametrize("case", ["float32, ZeRO-2, 1 ranks", "bf16, ZeRO-3, 2 ranks"])
def test_estimated_memory_is_within_20_percent_of_measured(case: str, launcher: Launcher) -> None:
    ended = launcher.run([BENCHMARKS / "memory_estimate.py", "--only", case])
    (row,) = re.findall(r"^\| .*ZeRO.*$", ended.stdout, flags=re.MULTILINE)
    _, *others = [(float(a), float(b)) for a, b in re.findall(r"(\d+) / (\d+)", row)]
    assert len(others) == 4, "generation, experience, training, and their peak"
    assert others[3][1] > 100, "the model and its batch take that many MiB, else this measures noise"
    for estimated, measured in others:
        assert estimated == pytest.approx(measured, rel=0.2), row
