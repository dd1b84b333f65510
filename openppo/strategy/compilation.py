"""Layers of trained models compiled by torch.compile: where that pays, what it needs, where its results are kept."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from openppo.config import DeepSpeedConfig

GPUS_COMPILE = True
"""Whether ``--compile auto`` compiles on GPUs, where a micro-batch of 32 x 512 tokens took 130 ms instead of 175.

That was a 0.5B model on an H200 (benchmarks/results/2026-11-27-h200.md), after 4 s of compiling. On CPUs a step takes
from 9 % less to 8 % more time (docs/speed.md).
"""


def compiles_by_default(device: torch.device) -> bool:
    """Whether ``--compile auto`` compiles layers on ``device`` unless there is an ``obstacle``."""
    return GPUS_COMPILE and device.type != "cpu"


def obstacle(config: DeepSpeedConfig, device: torch.device) -> str:
    """The reason not to compile layers by default, where there is one; else empty."""
    if config.zero_stage == 3:
        return "torch.compile does not see how --zero_stage 3 gathers weights"
    if config.deterministic:
        return "--deterministic needs the same kernels in every run"
    missing = missing_tool(device)
    return f"that needs {missing}" if missing else ""


def compile_layers(module: nn.Module) -> bool:
    """Have torch.compile take repeated layers one by one; False where the module does not name them.

    All layers of a kind share one graph, whatever the shapes; micro-batches of a single row have another.
    """
    names = {
        name
        for child in module.modules()
        for name in getattr(child, "_no_split_modules", None) or ()
    }
    layers = [child for child in module.modules() if type(child).__name__ in names]
    if layers:
        _keep_compiled_code()
        # Beyond its limit of 8, torch mixes compiled and plain passes, and gradients of checkpointed layers were wrong.
        torch._dynamo.config.recompile_limit = 64
    for layer in layers:
        layer.compile(dynamic=True)
    return bool(layers)


def has_compiled_layers(module: nn.Module) -> bool:
    """Whether layers of ``module`` are compiled."""
    return any(child._compiled_call_impl is not None for child in module.modules())


def missing_tool(device: torch.device) -> str:
    """The first tool of torch.compile that is missing for ``device``, in words; empty if all are there."""
    if device.type == "cpu":
        missing = missing_compiler("CXX", "g++")
    elif importlib.util.find_spec("triton") is None:
        missing = "the package triton, and there is none"
    else:
        missing = missing_compiler("CC", "gcc", "clang")  # Triton's
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not missing and not header.exists():
        missing = f"the header files of Python, and there are none ({header})"
    return missing


def missing_compiler(variable: str, *names: str) -> str:
    """Words for a compiler unless there is the one that the environment names, or one of ``names``."""
    compilers = [os.environ[variable]] if variable in os.environ else names
    if any(map(shutil.which, compilers)):
        return ""
    return f"a {'C++' if variable == 'CXX' else 'C'} compiler, and there is none ({' or '.join(compilers)})"


def _keep_compiled_code() -> None:
    """Let torch keep what it compiles between runs; its default is a folder for temporary files.

    A folder in ``TORCHINDUCTOR_CACHE_DIR`` wins, unless it is that default, which imports of torch put there. Where no
    folder can be written, torch keeps its default.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) != default_cache_dir():
        return
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        / "openppo"
        / "torchinductor"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
