"""Each script of the benchmarks starts; a tiny case runs; what the tables are made of is counted right."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fork_server import Launcher

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = ["agents", "async", "cpu_peers", "decode", "learning", "sweep"]
PARTICIPANTS = [
    "openppo_step",
    "trl_step",
    "openrlhf_step",
    "local_decode",
    "vllm_decode",
    "workload",
]
PARTICIPANTS += ["openppo_learn", "trl_learn", "openrlhf_learn"]
SWEEP = "sweep.py --workloads w2 --sizes 4 8 --repeat 1 --assets a", 2
ASYNC = "async.py --waits 0.02 --turns 2 --groups 2 --steps 1 --repeat 1", 5

measure, curves = (
    SimpleNamespace(**runpy.run_path(str(BENCHMARKS / f"peers/{name}.py")))
    for name in ("measure", "curves")
)


@pytest.mark.parametrize("script", [*COMMANDS, *(f"peers/{name}" for name in PARTICIPANTS)])
def test_help_answers(launcher: Launcher, script: str) -> None:
    ended = launcher.run([BENCHMARKS / f"{script}.py", "--help"], cwd=Path("/"))
    assert (ended.returncode, "usage" in ended.stdout) == (0, True), ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "rows"),
    [SWEEP, ASYNC],
    ids=lambda value: str(value).split(".")[0],
)
def test_a_tiny_case_runs_on_a_cpu(
    command: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script, *more = command.split()
    words = [sys.executable, str(BENCHMARKS / script), *more]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        len(re.findall(r"^\| (?:\w+, tiny|[48] |.* rank.* \|)", ended.stdout, re.MULTILINE)) == rows
    )


def test_disturbed_iterations_do_not_count_and_ratios_are_of_medians() -> None:
    def summary(name: str, *totals: float, stall: float = 0.8, share: float) -> Any:
        times = [
            {"total": t, "generation": share * t, "experience": 0.001, "training": t - share * t}
            for t in totals
        ]
        stalls = [stall if i == 1 else 0.0 for i in range(len(times))]
        iterations = [
            {**t, "tokens": 1e3, "others": 0.9, "stall": s}
            for t, s in zip(times, stalls, strict=True)
        ]
        return measure.summarize(name, iterations, 1.0)

    ours, theirs = (
        summary("OpenPPO", 9.0, 90.0, 11.0, share=0.2),
        summary("TRL 1.12.0", 13.0, share=0.6),
    )
    assert (ours.medians["total"], ours.n_kept, ours.n_discarded) == (10.0, 2, 1)
    row = next(
        line
        for line in measure.ratio_table("W1 float32", [ours, theirs])
        if "TRL 1.12.0 / OpenPPO" in line
    )
    # 13 / 10; generation 7.8 / 2; experience 0.001 / 0.001; training 5.2 / 8
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == [
        "1.30",
        "3.90",
        "1.00",
        "0.65",
        ">= 1.3",
        "yes",
    ]


def test_curves_of_seeds_are_averaged_and_compared_within_their_spread() -> None:
    def run(*rewards: float, heldout: float) -> dict[str, Any]:
        curve = [
            {"samples": 8 * i, "seconds": rewards[0] * i, "reward": r}
            for i, r in enumerate(rewards, 1)
        ]
        return {"curve": curve, "heldout": {"reward": heldout, "kl": 1.0}}

    ours = [run(1, 3, 5, 7, 9, heldout=1.0), run(3, 5, 7, 9, 11, heldout=2.0)]
    average = curves.average(ours)
    last = {
        name: values[-1] for name, values in average.items()
    }  # of the last four rollouts: 6 and 8
    assert last == {"samples": 40, "seconds": 10.0, "mean": 7.0, "least": 6.0, "most": 8.0}
    assert average["mean"][0] == 2.0
    # held-out 1.5 beside 3.5, each with a deviation of 0.71: the difference of two seeds has 1
    theirs = [run(1, 3, 5, 7, 9, heldout=3.0), run(3, 5, 7, 9, 11, heldout=4.0)]
    named = {"OpenPPO PPO": ours, "TRL PPO": theirs, "TRL GRPO": theirs}
    assert curves.table(named)[-1] == "OpenPPO PPO is below TRL PPO at held-out."
    assert "below no peer" in curves.table({"OpenPPO PPO": ours, "TRL PPO": ours})[-1]
    assert len(
        ElementTree.fromstring(curves.draw({"sort": named})).findall(".//{*}polyline")
    ) == 2 * len(named)


@pytest.mark.parametrize("tokens", [16, 400])
def test_operations_of_training_are_those_that_torch_counts(tokens: int) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, **heads)), torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    size = measure.ModelSize(
        layers=6, hidden=64, heads_width=64, kv_width=32, intermediate=256, vocabulary=512
    )
    # with all tokens as response there are logits for all; torch's eager attention computes the other half too
    mine = measure.training_flops(size, 0, tokens, 0) + 6 * 6 * 64 * tokens**2
    assert mine == pytest.approx(counter.get_total_flops(), rel=0.005)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="measuring peaks needs Linux's /proc"
)
@pytest.mark.parametrize("case", ["float32, ZeRO-2, 1 ranks", "bf16, ZeRO-3, 2 ranks"])
def test_estimated_memory_is_within_20_percent_of_measured(case: str, launcher: Launcher) -> None:
    ended = launcher.run([BENCHMARKS / "memory_estimate.py", "--only", case])
    (row,) = re.findall(r"^\| .*ZeRO.*$", ended.stdout, flags=re.MULTILINE)
    _, *others = [(float(a), float(b)) for a, b in re.findall(r"(\d+) / (\d+)", row)]
    assert len(others) == 4, "generation, experience, training, and their peak"
    assert others[3][1] > 100, (
        "the model and its batch take that many MiB, else this measures noise"
    )
    for estimated, measured in others:
        assert estimated == pytest.approx(measured, rel=0.2), row


@pytest.mark.parametrize("name", ["PPO, as it is", "GRPO, 7B LoRA", "ZeRO-3", "LoRA"])
def test_peaks_measured_on_a_gpu_are_within_a_tenth_above_the_estimate(name: str) -> None:
    script = runpy.run_path(str(BENCHMARKS / "memory_gpu.py"))
    phases = script["estimated"](*script["RUNS"][name])
    for phase, peak in script["measured"]()[name].items():
        assert 0.85 < peak * 2**30 / phases[phase] < 1.1, phase
