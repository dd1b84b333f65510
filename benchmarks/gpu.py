"""One PPO step on one GPU in bf16, beside plain transformers: seconds, tokens/s, shares of the device's peaks, memory.

    python benchmarks/gpu.py [--shape 0.5b 7b] [--tuning full lora] [--graphs off on] [--write]

Models are shaped like Qwen2.5 with random weights (benchmarks/peers/gpu_models.py, which also says why no response
ends early): 64 sequences of 1024 prompt and 1024 response tokens. OpenPPO runs ``trainer.step`` with a Python reward
function; transformers runs ``generate`` with its dynamic cache and a plain training step
(benchmarks/peers/gpu_step.py). Each runs in a process of its own, without cuDNN attention, which would plan anew for
each length. OpenPPO has a row with decode steps launched and one with them recorded (``--cuda_graphs``).

- MFU: floating-point operations that training needs (``training_flops`` in benchmarks/peers/measure.py; the critic's
  too, recomputed activations not counted) over training seconds x ``--peak_tflops``.
- Decode bandwidth: bytes of weights and cached keys and values that decode steps read (``decode_bytes``) over the
  seconds of generation without those of reading the prompts, which are measured alone; as shares of ``--peak_tb_s``
  and of ``--copy_tb_s``, what a large copy reached.
- Peaks of GPU memory are of each phase, beside the estimate where OpenPPO makes one.

``--shape tiny`` shows on a CPU that the script works; its figures mean nothing and are not written.
Nothing in this script has been run on a GPU yet.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.gpu_models import SHAPES, Shape
from peers.interleave import CACHE, HERE, REPOSITORY, describe_machine, say, write_results
from peers.measure import ModelSize, decode_bytes, training_flops

PHASES = ("generation", "experience", "training")
MFU_TARGETS = {"0.5b": 0.4, "7b": 0.5}
DECODE_TARGETS = {("0.5b", "full"): 5.0}
"""OpenPPO's tokens/s of generation over those of ``generate``."""
COLUMNS = ("generation", "prompts alone", "scoring", "experience", "training", "step")


def run_side(side: str, graphs: bool, name: str, tuning: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What ``gpu_step.py`` reports; ends the program with its output if it fails."""
    assets = arguments.cache / name
    if not assets.exists():
        say(f"building {name} in {assets}")
        subprocess.run([sys.executable, str(HERE / "gpu_models.py"), name, str(assets)], check=True, cwd="/")
    command = [sys.executable, str(HERE / "gpu_step.py"), "--side", side, "--assets", str(assets)]
    command += ["--shape", name, "--tuning", tuning]
    command += ["--warm_up", str(arguments.warm_up), "--steps", str(arguments.steps)]
    command += ["--cuda_graphs", "on" if graphs else "off"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tempfile.gettempdir())
    result = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    if done.returncode or result is None:
        sys.exit(f"{side}, {name}, {tuning}, ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    say(f"{side}, {name}, {tuning}: {result}")
    return json.loads(result.removeprefix("RESULT"))


def model_size(shape: Shape) -> ModelSize:
    """For counting."""
    width = shape.hidden // shape.heads
    kv_width = width * shape.kv_heads
    return ModelSize(shape.layers, shape.hidden, shape.hidden, kv_width, shape.intermediate, shape.vocabulary)


def rates(side: str, shape: Shape, tuning: str, took: dict[str, Any], peak_tflops: float) -> dict[str, float]:
    """``tokens/s`` of generation, ``tb/s`` of its decode steps, and ``mfu`` as a share of ``peak_tflops``."""
    size, adapters, lengths = model_size(shape), took["adapters"], (shape.prompt, shape.response)
    flops = training_flops(size, *lengths, adapters)
    if side == "OpenPPO" and shape.has_critic[tuning]:  # its adapters are those of the actor
        flops += training_flops(size, *lengths, adapters, has_head=False)
    read = decode_bytes(size, shape.n_responses, *lengths, adapters)
    return {
        "tokens/s": shape.n_responses * shape.response / took["generation"],
        "tb/s": read / (took["generation"] - took["prefill"]) / 1e12,
        "mfu": shape.n_responses * flops / took["training"] / (peak_tflops * 1e12),
    }


def row(name: str, took: dict[str, Any], rate: dict[str, float], tb_s: tuple[float, float]) -> str:
    """Of the table; '-' for what a side does not do. ``tb_s`` are the nominal and the measured bandwidth."""
    times = [took.get("prefill" if column == "prompts alone" else column) for column in COLUMNS]
    cells = ["-" if time is None else f"{time:.2f}" for time in times]
    cells += [f"{rate['tokens/s']:.0f}", *(f"{rate['tb/s'] / most:.1%}" for most in tb_s), f"{rate['mfu']:.1%}"]
    return f"| {name} | {' | '.join(cells)} | {took['peak_gib']:.1f} |"


def memory_row(name: str, took: dict[str, Any]) -> str:
    """Peak and estimate of each phase in GiB; '-' where there is none."""
    pairs = [(took["peaks"].get(phase), took["estimates"].get(phase)) for phase in PHASES]
    shown = [" / ".join("-" if gib is None else f"{gib:.1f}" for gib in pair) for pair in pairs]
    return f"| {name} | {' | '.join(shown)} |"


def target_rows(name: str, tuning: str, ours: dict[str, float], theirs: dict[str, float]) -> list[str]:
    """What the issue wants, beside what was measured; ``tiny`` has no targets."""
    wanted = []
    if name in MFU_TARGETS:
        wanted.append(("MFU of training", ours["mfu"], MFU_TARGETS[name]))
    if (name, tuning) in DECODE_TARGETS:
        ratio = ours["tokens/s"] / theirs["tokens/s"]
        wanted.append(("tokens/s of generation over generate's", ratio, DECODE_TARGETS[name, tuning]))
    return [
        f"| {name}, {tuning}: {what} | {measured:.2f} | >= {least} | {'yes' if measured >= least else 'no'} |"
        for what, measured, least in wanted
    ]


def measure(arguments: argparse.Namespace) -> list[str]:
    """The tables and what they leave out."""
    tb_s = arguments.peak_tb_s, arguments.copy_tb_s
    titles = [
        *(f"{c} s" for c in COLUMNS),
        "tokens/s",
        *(f"decode of {most:g} TB/s" for most in tb_s),
        "MFU",
        "peak GiB",
    ]
    lines = [f"| | {' | '.join(titles)} |", "| --- " * (len(titles) + 1) + "|"]
    memory = ["| peak / estimated GiB | " + " | ".join(PHASES) + " |", "| --- " * (len(PHASES) + 1) + "|"]
    targets, notes = ["| target | measured | wanted | reached |", "| --- | --- | --- | --- |"], []
    sides = [("OpenPPO", graphs == "on") for graphs in arguments.graphs] + [("transformers", False)]
    for name in arguments.shape:
        for tuning in arguments.tuning:
            shape, by_side = SHAPES[name], {}
            for side, graphs in sides:
                title = f"{side}{' with graphs' if graphs else ''}, {name}, {tuning}"
                took = run_side(side, graphs, name, tuning, arguments)
                by_side[side] = rates(side, shape, tuning, took, arguments.peak_tflops)  # of OpenPPO's rows the last
                lines.append(row(title, took, by_side[side], tb_s))
                memory.append(memory_row(title, took))
            targets += target_rows(name, tuning, by_side["OpenPPO"], by_side["transformers"])
            given = " ".join(f"--{key} {value}" for key, value in shape.options[tuning].items())
            notes.append(f"- {name}, {tuning}: {given}. {shape.notes.get(tuning, '')}".rstrip())
    peak = (
        f"MFU is of {arguments.peak_tflops:g} TFLOP/s; medians of {arguments.steps} steps. No side has cuDNN attention."
    )
    plain = "Plain transformers trains one model, without a critic and without float32 master weights."
    wanted = [*targets, ""] if len(targets) > 2 else []
    return [*lines, "", *memory, "", *wanted, f"{peak} {plain}", "", *notes]


def main() -> None:
    """Parse the command line, measure, print and perhaps write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["0.5b", "7b"])
    parser.add_argument("--tuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="dense bf16; default: H200")
    parser.add_argument("--peak_tb_s", type=float, default=4.8, help="nominal memory bandwidth; default: H200")
    parser.add_argument("--copy_tb_s", type=float, default=4.3, help="bandwidth of a large copy; default: H200")
    parser.add_argument("--warm_up", type=int, default=1, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument(
        "--graphs", nargs="+", choices=["off", "on"], default=["off", "on"], help="a row of OpenPPO each"
    )
    parser.add_argument("--cache", type=Path, default=CACHE / "gpu", help="models, built on first use (16 GB for 7b)")
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/results")
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.resolve()
    if "tiny" in arguments.shape and arguments.write:
        parser.error("--write keeps no figures of --shape tiny, which mean nothing: leave one of them away")
    import torch

    if arguments.shape != ["tiny"] and not torch.cuda.is_available():
        parser.error("there is no GPU: only --shape tiny runs on a CPU")
    if not torch.cuda.is_available():
        arguments.graphs = ["off"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: these figures mean nothing"
    lines = [device, "", *measure(arguments), "", f"torch {torch.__version__}; {describe_machine({})[0]}"]
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("gpu-" + "-".join([*arguments.shape, *arguments.tuning]), "One PPO step on one GPU", lines)


if __name__ == "__main__":
    main()
