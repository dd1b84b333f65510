"""What a GPU does with single parts: peaks, attention kernels, decode steps. Steps of ``gpu_first_hour.sh``.

    python benchmarks/gpu_probe.py environment|sdpa|decode [--shape 0.5b] [--json FILE]
    python benchmarks/gpu_probe.py collect FOLDER OUT          all steps' tables in one page and one JSON file

``--shape tiny`` runs on a CPU, to show that the code works: its figures mean nothing.
"""

import argparse
import json
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu import model_size
from peers.gpu_models import EOS, PAD, SHAPES, Shape, build
from peers.interleave import CACHE, REPOSITORY, describe_machine, say
from peers.measure import decode_bytes
from torch.profiler import ProfilerActivity, profile

Row = dict[str, Any]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def seconds(work: Callable[[], Any]) -> float:
    """Of one call, with the GPU's work."""
    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def kernels(work: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Name, calls and milliseconds of the device's kernels, or of a CPU's operators, the longest first."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as recorded:
        seconds(work)
    wanted = torch.autograd.DeviceType.CUDA if ON_GPU else torch.autograd.DeviceType.CPU
    events = [event for event in recorded.key_averages() if event.device_type == wanted]
    took = [(e.key, e.count, (e.self_device_time_total if ON_GPU else e.self_cpu_time_total) / 1e3) for e in events]
    return sorted(took, key=lambda kernel: -kernel[2])


def environment(arguments: argparse.Namespace) -> Iterator[Row]:
    """Versions, the order in which SDPA's kernels are tried, and peaks of a large copy and a large product."""
    import deepspeed
    import transformers

    yield {"what": "device", "found": torch.cuda.get_device_name() if ON_GPU else "CPU"}
    yield {
        "what": "versions",
        "found": f"torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, transformers {transformers.__version__}, "
        f"DeepSpeed {deepspeed.__version__}",
    }
    yield {"what": "SDPA kernels, first to last", "found": str(torch._C._get_sdp_priority_order())}
    n = 1 << (30 if ON_GPU else 20)
    source, target = torch.empty(n, dtype=torch.uint8, device=DEVICE), torch.empty(n, dtype=torch.uint8, device=DEVICE)
    target.copy_(source)
    copy_s = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(10))
    yield {"what": "copy, TB/s read and written", "found": round(2 * n / copy_s / 1e12, 3)}
    width = 8192 if ON_GPU else 128
    factor = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
    factor @ factor
    product_s = statistics.median(seconds(lambda: factor @ factor) for _ in range(10))
    yield {"what": "product in bfloat16, TFLOP/s", "found": round(2 * width**3 / product_s / 1e12, 2)}


def sdpa(arguments: argparse.Namespace) -> Iterator[Row]:
    """Attention as transformers calls it: operator, first and fifth call of new lengths, finite gradients or not."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    shape = SHAPES[arguments.shape]
    lengths = [704, 1088, 1344, 1600, 1984] if ON_GPU else [24, 40]  # L % 128 == 64: where cuDNN gives NaN
    module = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True, training=True)
    for cudnn in (True, False) if ON_GPU else (False,):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for dtype in (torch.bfloat16, torch.float32):
            for kind in ("training", "training, padding mask", "training, block mask", "decode, padding mask"):
                yield {"cuDNN": "on" if cudnn else "off", "dtype": str(dtype)[6:], "pass": kind} | _attention(
                    sdpa_attention_forward, module, shape, kind, dtype, lengths
                )


def _attention(attend: Any, module: Any, shape: Shape, kind: str, dtype: torch.dtype, lengths: list[int]) -> Row:
    trains, first, fifth, is_finite = kind.startswith("training"), [], [], True
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    for length in lengths:
        n_rows, n_queries, width = (4, length, shape.hidden // shape.heads) if trains else (64, 1, 64)
        sizes = ((shape.heads, n_queries), (shape.kv_heads, length), (shape.kv_heads, length))
        inputs = [
            torch.randn(n_rows, n, size, width, device=DEVICE, dtype=dtype, requires_grad=trains) for n, size in sizes
        ]
        places = torch.arange(length, device=DEVICE)
        mask = None
        if "padding" in kind:  # on the left, as rows of the engine begin
            starts = torch.arange(n_rows, device=DEVICE)[:, None] % (length // 2)
            seen = places[None, None, :] >= starts[:, :, None]
            mask = (seen & (places[:, None] >= places) if trains else seen)[:, None]
            mask = mask | torch.eye(length, dtype=torch.bool, device=DEVICE) if trains else mask
        elif "block" in kind:
            document = places >= length // 3
            mask = ((document[:, None] == document) & (places[:, None] >= places))[None, None].expand(n_rows, 1, -1, -1)

        work = partial(_attend, attend, module, inputs, mask)
        times = [seconds(work) for _ in range(5)]
        first.append(1e3 * times[0])
        fifth.append(1e3 * times[-1])
        is_finite &= not trains or all(bool(x.grad.isfinite().all()) for x in inputs)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    names = [event.key for event in recorded.key_averages() if event.key.startswith("aten::_scaled_dot_product_")]
    names = [name.removeprefix("aten::_scaled_dot_product_") for name in names if "backward" not in name]
    operators = {name.replace("attention_", "").replace("_attention", "") for name in names}
    peak = torch.cuda.max_memory_allocated() / 2**20 if ON_GPU else 0
    return {
        "operator": " ".join(sorted(operators)),
        "1st ms": round(statistics.median(first), 2),
        "5th ms": round(statistics.median(fifth), 2),
        "finite": is_finite,
        "peak MiB": round(peak),
    }


def _attend(attend: Any, module: Any, inputs: list[Any], mask: Any) -> None:
    output = attend(module, *inputs, mask, is_causal=mask is None)[0]
    if output.requires_grad:
        output.sum().backward()


def decode(arguments: argparse.Namespace) -> Iterator[Row]:
    """Milliseconds of a decode step, what of it the GPU is at work, its kernels, and the bandwidth reached."""
    from openppo.models import Actor
    from openppo.rollout.decode_graphs import CUDARecorder
    from openppo.rollout.hf_engine import HFEngine
    from openppo.strategy.comm import set_up_gpu
    from openppo.types import SamplingParams

    set_up_gpu(bf16=True)
    shape, folder = SHAPES[arguments.shape], arguments.cache / arguments.shape
    if not folder.exists():
        build(shape, folder)
    model: Any = Actor(str(folder / "policy"), bf16=True).eval().to(DEVICE).model
    steps, context = (40, shape.prompt) if ON_GPU else (4, 8)
    for n_rows in (64, 256) if ON_GPU else (4,):
        for recorder in (None, CUDARecorder) if ON_GPU else (None,):
            for top_p in (1.0, 0.95):
                engine = HFEngine(model, [EOS], PAD, n_rows, new_recorder=recorder)
                for seed in range(n_rows):
                    ids = [4 + (seed + i) % 4000 for i in range(context)]
                    engine.submit(ids, SamplingParams(3 * steps, top_p=top_p), seed)
                while engine.read_tokens < n_rows * context:
                    engine.step()
                slowest = max(seconds(engine.step) for _ in range(3))  # with graphs: of recording
                step_ms = 1e3 * seconds(partial(_repeat, engine.step, steps)) / steps
                found = kernels(partial(_repeat, engine.step, 4))
                busy, launched = sum(k[2] for k in found) / 4, sum(k[1] for k in found) / 4
                read = decode_bytes(model_size(shape), n_rows, context + 3, steps) / (steps - 1)
                yield {
                    "rows": n_rows,
                    "graphs": recorder is not None,
                    "top_p": top_p,
                    "ms a step": round(step_ms, 2),
                    "GPU at work, ms": round(busy, 2),
                    "kernels": round(launched),
                    "slowest of 3, ms": round(1e3 * slowest, 1),
                    "tokens/s": round(1e3 * n_rows / step_ms),
                    "TB/s": round(read / step_ms / 1e9, 3),
                    "longest kernels": "; ".join(f"{name[:40]} {ms / 4:.2f}" for name, _, ms in found[:3]),
                }


def _repeat(work: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        work()


def table(rows: list[Row]) -> list[str]:
    """Rows as Markdown, one column for each name in any of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    return lines + [f"| {' | '.join(str(row.get(name, '-')).replace('|', '/') for name in names)} |" for row in rows]


def report(rows: Iterator[Row], file: Path | None) -> None:
    """Print the table, and keep the rows; a part that fails leaves those before it."""
    kept: list[Row] = []
    try:
        for row in rows:
            kept.append(row)
            if file is not None:
                file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    finally:
        say("\n".join(table(kept)))


def collect(folder: Path, out: Path) -> None:
    """Write one page and one JSON file of all steps in ``folder``: name, limit, status, seconds in ``steps.tsv``."""
    device = torch.cuda.get_device_name() if ON_GPU else "CPU: these figures mean nothing"
    name = f"{date.today().isoformat()}-gpu-first-hour-{re.sub(r'[^a-z0-9]+', '-', device.split(':')[0].lower())}"
    machine = f"torch {torch.__version__}; {describe_machine({})[0]}"
    lines, kept = [f"# The first hour on a GPU, {date.today().isoformat()}", "", device, "", machine, ""], {}
    for step in (folder / "steps.tsv").read_text(encoding="utf-8").splitlines():
        title, limit, status, took = step.split("\t")
        how = {"0": "ended", "124": "ran out of time", "137": "ran out of time"}.get(
            status, f"failed with status {status}"
        )
        lines += [
            f"## {title}",
            "",
            f"{how} after {took} s of {limit} s at most",
            "",
            (folder / f"{title}.md").read_text(),
        ]
        if status != "0":
            lines += ["```", *(folder / f"{title}.log").read_text(errors="replace").splitlines()[-15:], "```", ""]
        file = folder / f"{title}.json"
        rows = json.loads(file.read_text()) if file.exists() else []
        kept[title] = {"status": int(status), "seconds": int(took), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", "\n".join(lines)), (".json", json.dumps({"device": device, "steps": kept}, indent=1))):
        (out / f"{name}{suffix}").write_text(without_places(text).rstrip() + "\n", encoding="utf-8")
    say(f"{name}.md and .json are in {out}")


def without_places(text: str) -> str:
    """``text`` without the names of this machine, its folders and its user."""
    for place in (str(REPOSITORY), str(CACHE), str(Path.home()), socket.gethostname()):
        text = text.replace(place, "...")
    return re.sub(r"/(?:tmp|home|root|work|usr|opt|mnt)/[^\s'\"]*/", ".../", text)


def main() -> None:
    """Parse the command line and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"environment": environment, "sdpa": sdpa, "decode": decode}
    parser.add_argument("part", choices=[*parts, "collect"])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--cache", type=Path, default=CACHE / "gpu", help="models, built on first use")
    parser.add_argument("--json", type=Path, help="where the rows are kept, too")
    arguments = parser.parse_args()
    if arguments.part == "collect":
        collect(*arguments.folders)
    elif arguments.shape != "tiny" and not ON_GPU:
        parser.error("there is no GPU: only --shape tiny runs on a CPU")
    else:
        report(parts[arguments.part](arguments), arguments.json)


if __name__ == "__main__":
    main()
