"""Stage of parts of a step: a decode step and a training micro-batch alone, in each way to compute layers."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.assets import assets_of, model_size, seconds, shape_of
from benchmarks.gpu.models import EOS, PAD
from benchmarks.gpu.rows import PEAK_TFLOPS, attempt, bandwidths, emit
from benchmarks.peers.measure import decode_bytes, training_flops
from openppo.media import TokenIds
from openppo.models import Actor
from openppo.models.lengths import decide_alike, lengths_are_exact
from openppo.rollout.decode_graphs import CUDARecorder
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.comm import set_up_gpu
from openppo.strategy.compilation import compile_layers
from openppo.strategy.fused_kernels import fuse_kernels, has_kernels
from openppo.types import ModelInputs, SamplingParams, SingleProcess

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
N_ROWS = (64, 256) if ON_GPU else (4,)
CONTEXT, STEPS = (512, 30) if ON_GPU else (8, 4)
BATCHES = ((32, 512, False), (32, 512, True)) if ON_GPU else ((2, 16, True),)
"""Rows, tokens of the longest, and whether they are of unequal lengths."""


class Way(NamedTuple):
    """How layers are computed: attention by lengths or under a mask, fused kernels, torch.compile."""

    by_lengths: bool
    fuses: bool
    compiles: bool


def parts() -> None:
    """Milliseconds, kernels and shares of the device's limits, of each way that this GPU has to compute layers."""
    set_up_gpu(bf16=True)
    by_lengths, fused = lengths_are_exact(), has_kernels(torch.device(DEVICE), SingleProcess())
    ways = [
        Way(by_lengths, fuses, compiles) for fuses in (fused, False) for compiles in (False, ON_GPU)
    ]
    if by_lengths:
        ways.append(Way(by_lengths=False, fuses=False, compiles=False))
    for way in dict.fromkeys(ways):
        decide_alike([way.by_lengths])  # as if it failed on another rank
        actor = Actor(str(assets_of("0.5b") / "policy"), bf16=True).eval().to(DEVICE)
        if way.fuses:
            fuse_kernels(actor, torch.device(DEVICE), SingleProcess())
        if way.compiles:
            compile_layers(actor)
        name = str(actor.model.config._attn_implementation)
        layers = {"attention": name, "fused": way.fuses, "compiled": way.compiles}
        cases = [
            (n, recorder, 1.0)
            for n in N_ROWS
            for recorder in ((CUDARecorder, None) if ON_GPU else (None,))
        ]
        if ON_GPU and way.by_lengths:
            cases.append((N_ROWS[0], CUDARecorder, 0.95))
        for n_rows, recorder, top_p in (
            [] if way.compiles else cases
        ):  # decode steps are never compiled
            row = {**layers, "rows": n_rows, "graphs": recorder is not None, "top_p": top_p}
            attempt("decode", partial(decode, actor.model, recorder, row), **row)
        for n_rows, length, ragged in BATCHES:
            row = {**layers, "rows": n_rows, "length": length, "ragged": ragged}
            attempt("training", partial(train, actor, row), **row)
        del actor
        if ON_GPU:
            torch.cuda.empty_cache()


def kernels(work: Callable[[], Any]) -> list[tuple[str, int, float]]:
    """Name, calls and milliseconds of the device's kernels, or of a CPU's operators, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if ON_GPU else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        seconds(work)
    wanted = torch.autograd.DeviceType.CUDA if ON_GPU else torch.autograd.DeviceType.CPU
    events = [event for event in recorded.key_averages() if event.device_type == wanted]
    times = [
        event.self_device_time_total if ON_GPU else event.self_cpu_time_total for event in events
    ]
    rows = [(event.key, event.count, time / 1e3) for event, time in zip(events, times, strict=True)]
    return sorted(rows, key=lambda row: -row[2])


def decode(model: Any, recorder: Any, row: dict[str, Any]) -> None:
    """Write the row of a decode step, and of its longest kernels."""
    n_rows, size = row["rows"], model_size(shape_of("0.5b"))
    engine = HFEngine(model, [EOS], PAD, n_rows, new_recorder=recorder)
    for seed in range(n_rows):
        ids = [4 + (seed + i) % 4000 for i in range(CONTEXT)]
        engine.submit(TokenIds(ids), SamplingParams(6 * STEPS, top_p=row["top_p"]), seed)

    def read_prompts() -> None:
        while engine.read_tokens < n_rows * CONTEXT:
            engine.step()

    def steps(number: int) -> None:
        for _ in range(number):
            engine.step()

    prefill_s = seconds(read_prompts)
    first_s = max(seconds(engine.step) for _ in range(3))  # with graphs: of recording
    times = [1e3 * seconds(lambda: steps(STEPS)) / STEPS for _ in range(2)]
    longest = kernels(lambda: steps(4))
    read = decode_bytes(size, n_rows, CONTEXT + 3, 2 * STEPS) / (2 * STEPS - 1)
    emit(
        "decode",
        **row,
        ms=round(min(times), 3),
        again_ms=round(max(times), 3),
        busy_ms=round(sum(kernel[2] for kernel in longest) / 4, 3),
        kernels=round(sum(kernel[1] for kernel in longest) / 4),
        first_ms=round(1e3 * first_s, 1),
        prefill_s=round(prefill_s, 2),
        tokens_s=round(1e3 * n_rows / min(times)),
        **{
            f"% of {name}": round(100 * read / min(times) / 1e9 / tb_s, 1)
            for name, tb_s in bandwidths().items()
        },
    )
    for name, n_calls, ms in longest[:6]:
        emit("decode kernels", **row, kernel=name[:100], calls=n_calls / 4, ms=round(ms / 4, 3))


def launching_seconds(work: Callable[[], Any]) -> float:
    """Seconds of the host in one call, without waiting for the GPU's work."""
    if ON_GPU:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def train(actor: Actor, row: dict[str, Any]) -> None:
    """Write the row of a forward and backward pass, and of its longest kernels."""
    n_rows, length, size = row["rows"], row["length"], model_size(shape_of("0.5b"))
    actor.train()
    for parameter in actor.parameters():
        parameter.requires_grad_(True)
    ids = torch.randint(4, 4000, (n_rows, length))  # (B, L), as all below
    ends = torch.linspace(length // 4 if row["ragged"] else length, length, n_rows).long()
    mask = torch.arange(length) < ends[:, None]
    actions = mask & (torch.arange(length) >= length // (8 if row["ragged"] else 2))
    inputs = ModelInputs(ids, mask).to(DEVICE)
    actions = actions.to(DEVICE)

    def work() -> None:
        actor.zero_grad(set_to_none=True)
        (actor(inputs, actions).sum() / 1000).backward()

    first = seconds(work)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    took = statistics.median(seconds(work) for _ in range(3))
    launching = statistics.median(launching_seconds(work) for _ in range(3))
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    longest = kernels(work)
    n_tokens, busy = int(mask.sum()), sum(kernel[2] for kernel in longest)
    flops = (
        n_rows * training_flops(size, length // 2, length - length // 2) * n_tokens / mask.numel()
    )
    emit(
        "training",
        **row,
        tokens=n_tokens,
        ms=round(1e3 * took, 1),
        first_ms=round(1e3 * first, 1),
        host_ms=round(1e3 * launching, 1),
        busy_ms=round(busy, 1),
        kernels=sum(kernel[1] for kernel in longest),
        tokens_s=round(n_tokens / took),
        MFU_percent=round(100 * flops / took / PEAK_TFLOPS / 1e12, 1),
        peak_gib=round(peak, 1),
    )
    for name, n_calls, ms in longest[:8]:
        share = f"{ms / max(busy, 1e-9):.1%}"
        emit(
            "training kernels",
            **row,
            kernel=name[:100],
            calls=n_calls,
            ms=round(ms, 2),
            share=share,
        )
