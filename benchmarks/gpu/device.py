"""Stages about the machine: what is there, the limits of its device, and the tests that need one."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.assets import cpu_count, seconds
from benchmarks.gpu.rows import DRY, REPOSITORY, WORK, attempt, emit, keep_finding, log

PACKAGES = "transformers deepspeed accelerate peft datasets trl triton numpy pyarrow pydantic huggingface_hub"
IMPORTS = (
    "import torch, transformers, deepspeed, datasets; from openppo.trainer import build_ppo_trainer"
)


def environment() -> None:
    """Versions, the limits of this device, and whether attention by lengths agrees with SDPA on it."""
    import torch

    on_gpu = torch.cuda.is_available()
    keep_finding("device", torch.cuda.get_device_name() if on_gpu else "CPU")
    keep_finding("versions", _versions())
    if on_gpu:
        keep_finding(
            "GPU memory, GiB", round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2)
        )
        keep_finding("compute capability", list(torch.cuda.get_device_capability()))
    keep_finding("host", _host())
    for part in (_copy, _product, _launch, _from_host, _lengths, _imports):
        attempt("environment", part, what=part.__name__.strip("_"))


def _versions() -> str:
    import torch

    versions = []
    for name in PACKAGES.split():
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} missing")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "-"
    cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}; {', '.join(versions)}"


def _host() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    shm, disk = (shutil.disk_usage(place).free / 2**30 for place in ("/dev/shm", WORK))
    tools = [name for name in ("git", "python", "nvcc", "cc") if shutil.which(name)]
    return (
        f"{cpu_count()} CPUs, {memory:.0f} GiB, free in memory {shm:.0f} GiB and on the disk {disk:.0f} GiB, "
        f"on the PATH: {' '.join(tools) or 'none of git, python, nvcc, cc'}"
    )


def _copy() -> None:
    import torch

    n_bytes = 1 << (32 if torch.cuda.is_available() else 22)
    source = torch.randint(0, 255, (n_bytes // 8,), dtype=torch.int64, device=_device()).view(
        torch.uint8
    )
    target = torch.empty_like(source)
    target.copy_(source)
    took = statistics.median(seconds(lambda: target.copy_(source)) for _ in range(10))
    keep_finding("copy, TB/s read and written", round(2 * n_bytes / took / 1e12, 3))


def _product() -> None:
    import torch

    width = 8192 if torch.cuda.is_available() else 128
    left, right = (torch.randn(width, width, device=_device()).bfloat16() for _ in range(2))
    left @ right
    took = statistics.median(seconds(lambda: left @ right) for _ in range(10))
    keep_finding("product in bfloat16, TFLOP/s", round(2 * width**3 / took / 1e12, 2))


def _launch() -> None:
    import torch

    tensor, times = torch.zeros(8, device=_device()), 2000

    def launch() -> None:
        for _ in range(times):
            tensor.add_(1)

    launch()
    keep_finding("host time to launch a kernel, us", round(seconds(launch) / times * 1e6, 2))


def _from_host() -> None:
    import torch

    if not torch.cuda.is_available():
        return
    n_bytes = 1 << 30
    pinned = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target.copy_(pinned)
    took = statistics.median(seconds(lambda: target.copy_(pinned)) for _ in range(3))
    keep_finding("pinned host to device, GB/s", round(n_bytes / took / 1e9, 1))


def _lengths() -> None:
    import torch

    from openppo.models.lengths import difference_from_sdpa

    if DRY:
        keep_finding("attention by lengths", "not on a CPU")
    else:
        keep_finding(
            "attention by lengths", difference_from_sdpa(torch.device("cuda")) or "agrees with SDPA"
        )


def _imports() -> None:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    keep_finding("imports of a run, s", round(time.perf_counter() - began, 1))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def tests() -> None:
    """Run tests/gpu, in several processes where pytest can: a row of counts, and one for each failure."""
    report = WORK / "tests.xml"
    report.unlink(missing_ok=True)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=12",
        f"--junitxml={report}",
    ]
    words += ["-k", "border or counted or seen"] if DRY else ["-m", "gpu"]
    if importlib.util.find_spec("xdist"):
        words += ["-n", "1" if DRY else "8", "--dist", "worksteal"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*words, "tests/gpu"], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    log("tests/gpu", done.stdout + done.stderr[-3000:], 30000)
    lines = (done.stdout.strip() or done.stderr.strip() or "nothing was printed").splitlines()
    emit("tests", status=done.returncode, summary=lines[-1][:200])
    _failures(report)


def _failures(report: Path) -> None:
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else []:
        for kind in ("failure", "error"):
            for failure in case.findall(kind):
                took = round(float(case.get("time", 0)), 1)
                emit(
                    "tests",
                    test=case.get("name"),
                    seconds=took,
                    failed=(failure.get("message") or "")[:500],
                )
