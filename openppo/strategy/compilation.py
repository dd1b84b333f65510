"""Compilation of trained models' layers by torch.compile: its default, its tools, its cache."""

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
"""True if ``--compile auto`` compiles on GPUs.

A micro-batch of 32 x 512 tokens took 130 ms instead of 175, with a 0.5B model on an H200 and after 4 s of compiling
(benchmarks/results/2026-11-27-h200.md). On CPUs a step takes from 9 % less to 8 % more time (docs/speed.md).
"""


def compiles_by_default(device: torch.device) -> bool:
    """True if ``--compile auto`` compiles layers on ``device`` unless there is an ``obstacle``."""
    return GPUS_COMPILE and device.type != "cpu"


def obstacle(config: DeepSpeedConfig, device: torch.device) -> str:
    """Return the reason not to compile layers by default; empty if there is none."""
    if config.zero_stage == 3:
        return "torch.compile does not see how --zero_stage 3 gathers weights"
    if config.deterministic:
        return "--deterministic needs the same kernels in every run"
    missing = missing_tool(device)
    return f"that needs {missing}" if missing else ""


def compile_layers(module: nn.Module) -> bool:
    """Compile repeated layers one by one; return False if the module does not name them.

    All layers of a kind share one graph, whatever the shapes; micro-batches of a single row have another.
    """
    names: set[str] = set()
    for child in module.modules():
        names.update(getattr(child, "_no_split_modules", None) or ())
    layers = [child for child in module.modules() if type(child).__name__ in names]
    if not layers:
        return False

    _keep_compiled_code()
    # Beyond its default of 8, torch mixes compiled and plain passes; gradients of checkpointed layers were wrong then.
    torch._dynamo.config.recompile_limit = 64
    for layer in layers:
        layer.compile(dynamic=True)
    return True


def has_compiled_layers(module: nn.Module) -> bool:
    """True if layers of ``module`` are compiled."""
    return any(child._compiled_call_impl is not None for child in module.modules())


def missing_tool(device: torch.device) -> str:
    """Return the first missing tool of torch.compile on ``device``, in words; empty if all are there."""
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
    """Describe the missing compiler; empty if one of ``names`` is there.

    If the environment sets ``variable``, that compiler counts instead of ``names``.
    """
    compilers = [os.environ[variable]] if variable in os.environ else names
    if any(map(shutil.which, compilers)):
        return ""
    language = "C++" if variable == "CXX" else "C"
    return f"a {language} compiler, and there is none ({' or '.join(compilers)})"


def _keep_compiled_code() -> None:
    """Let torch keep compiled code between runs; its default is a folder for temporary files.

    A folder in ``TORCHINDUCTOR_CACHE_DIR`` takes precedence, unless it is that default, which importing torch puts
    there. If no folder can be written, torch keeps its default.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) != default_cache_dir():
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "openppo" / "torchinductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
