"""A look at this machine for bug reports: devices, attention, kernels, compilers, and a tiny training step."""

import importlib.util
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.models.attention import (
    BY_LENGTHS,
    HAS_AMX,
    ON_CPU,
    ON_GPU,
    ON_OLDER_GPU,
    use_fast_attention,
)
from openppo.strategy.compilation import compiles_by_default, missing_compiler, missing_tool
from openppo.strategy.cpu_adam import is_compiled
from openppo.strategy.fault_report import host_memory

_ATTENTION = {
    ON_CPU: "SDPA, causal rows in blocks, shared keys not copied",
    ON_GPU: "SDPA with a mask, shared keys not copied",
    ON_OLDER_GPU: "SDPA with a mask, keys copied for each head",
    BY_LENGTHS: "FlashAttention of torch by lengths, without padding",
}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Largest difference of a loss near 5 from that of transformers' eager attention in float32."""
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CXX",
    "CC",
)
"""Variables of the environment that change what a run does; none holds a secret."""
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """A fact about this machine, in a section of the report.

    ``remedy`` is empty where all is in order; without what is ``needed``, no training starts.
    """

    section: str
    name: str
    value: str
    remedy: str = ""
    needed: bool = False

    @property
    def mark(self) -> str:
        """The first word of its line."""
        if not self.remedy:
            return "ok"
        return "missing" if self.needed else "optional"


def look_at_machine() -> Iterator[Finding]:
    """Yield findings in the order of the report; it takes about a second on a CPU."""
    yield from _devices()
    yield from _places()
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            yield tiny_step(device, dtype)
    yield from _kernels(devices[-1])
    yield from _compilers()


def tiny_step(device: torch.device, dtype: torch.dtype) -> Finding:
    """Take a forward and backward pass of a tiny random Llama, with the attention that a run would use."""
    name = f"{device} {str(dtype).removeprefix('torch.')}"
    try:
        value, problem = _step(device, dtype)
    except RuntimeError as error:  # of CUDA, or a kernel
        problem = " ".join(str(error).split())[:300]
        value = "fails"
    remedy = problem and f"{problem}; install a torch that fits this device and its driver"
    return Finding("forward and backward", name, value, remedy=remedy, needed=True)


def _step(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return time, memory and attention of one training step, and the problem with its result."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
        ids = torch.randint(128, (4, 32))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    model.set_attn_implementation("sdpa")

    model.to(device, dtype)
    ids = ids.to(device)
    on_gpu = device.type == "cuda"
    current: AbstractContextManager[Any] = torch.cuda.device(device) if on_gpu else nullcontext()
    with current:
        use_fast_attention(model)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        squares = [p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        seconds = time.perf_counter() - start

    problem = ""
    if not abs(loss.item() - expected) <= _TOLERANCE[dtype]:  # true for NaN
        problem = f"its loss is {loss.item():.4g}, and {expected:.4g} on the CPU by plain attention"
    elif not 0 < norm < float("inf"):
        problem = f"its gradient has the norm {norm:.4g}"
    memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of the process"
    if on_gpu:
        memory = f"{torch.cuda.max_memory_allocated(device) / _GIB:.2f} GiB"
    attention = model.config._attn_implementation
    words = _ATTENTION.get(attention, attention)
    return f"{1000 * seconds:.0f} ms, at most {memory}; attention: {words}", problem


def _devices() -> Iterator[Finding]:
    """Processor and memory, and each GPU."""
    features = [name for name, has in torch.cpu.get_capabilities().items() if has is True]
    shown: list[str] = [name for name in ("avx2", "avx512_bf16", "avx512_f") if name in features]
    if HAS_AMX:
        shown.append("amx_bf16")
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        "devices",
        "CPU",
        f"{_processor()}, {cores} of {os.cpu_count()} cores usable; {' '.join(shown)}",
    )
    yield Finding("devices", "memory", host_memory())

    if not torch.cuda.is_available():
        if torch.version.cuda and Path("/dev/nvidiactl").exists():
            remedy = (
                f"its driver may be too old for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES "
                "hides it"
            )
            yield Finding("devices", "GPU", "present, not usable", remedy=remedy)
        else:
            yield Finding("devices", "GPU", "none that torch can use; runs take the CPU")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        yield Finding("devices", f"GPU {index}", f"{gpu.name}, {gpu.major}.{gpu.minor}, {memory}")


def _processor() -> str:
    """Model of the processor, where Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _places() -> Iterator[Finding]:
    """Disk, launcher, and variables of the environment."""
    free = shutil.disk_usage(".").free
    writable = os.access(".", os.W_OK)
    remedy = "" if writable else "it cannot be written: go to another, or name one with --save_path"
    yield Finding("places", "working folder", f"{free / _GIB:.1f} GiB free", remedy=remedy)

    has_torchrun = shutil.which("torchrun") is not None
    yield Finding(
        "places",
        "torchrun",
        "on the PATH" if has_torchrun else "not on the PATH",
        remedy="" if has_torchrun else "start with python -m torch.distributed.run instead",
    )
    values = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    yield Finding("places", "environment", " ".join(values) or "nothing that changes a run")


def _kernels(device: torch.device) -> Iterator[Finding]:
    """Fused kernels and compiled layers on ``device``, the one of a run."""
    if device.type == "cpu":
        yield Finding("kernels", "fused", "none: they are for GPUs")
        yield Finding("kernels", "compiled layers", "not by default on CPUs")
        return

    absent = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    yield Finding(
        "kernels",
        "fused",
        f"{' and '.join(absent)} not installed" if absent else "RMSNorm, rotary embedding, MLP",
        remedy="pip install 'openppo[gpu]'" if absent else "",
    )
    flash_attn = "installed" if importlib.util.find_spec("flash_attn") else "not installed"
    yield Finding("kernels", "flash-attn", f"{flash_attn}, for --flash_attn alone")
    missing = missing_tool(device)
    if not compiles_by_default(device):
        yield Finding("kernels", "compiled layers", "not by default")
    elif missing:
        yield Finding("kernels", "compiled layers", "none", remedy=f"install {missing}")
    else:
        yield Finding("kernels", "compiled layers", "by default")


def _compilers() -> Iterator[Finding]:
    """Tools that --adam_offload needs."""
    missing = missing_compiler("CXX", "c++")
    ninja = cpp_extension.is_ninja_available()
    remedy = ""
    if missing:
        remedy = f"--adam_offload needs {missing}; install g++"
    elif not ninja:
        remedy = "--adam_offload needs ninja: pip install ninja"
    value = "compiled before" if is_compiled() else "compiled by the first run with --adam_offload"
    yield Finding("compilers", "DeepSpeed's CPU Adam", value, remedy=remedy)
