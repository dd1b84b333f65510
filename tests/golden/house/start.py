"""The commit that a recording is of, on this machine: which bits it would give here."""

import io
import subprocess
import tarfile
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from tests.fork_server import REPO

PACKAGE = ("openppo", "examples/own_loop.py")
LIBRARIES = ("torch", "numpy", "transformers", "peft", "deepspeed")
INSTRUCTIONS = ("fma", "avx", "sse4", "amx", "bf16", "asimd", "sve")


@cache
def kind() -> str:
    """What decides bits: the processor's model and instructions, by which torch, MKL and oneDNN choose kernels, the
    kernels that torch chose, and the versions of libraries.
    """
    model, flags = processor()
    chosen = sorted(flag for flag in flags if flag.startswith(INSTRUCTIONS))
    versions = [f"{name} {version(name)}" for name in LIBRARIES]
    return "; ".join([model, torch.backends.cpu.get_cpu_capability(), " ".join(chosen), *versions])


def processor() -> tuple[str, set[str]]:
    """Name and flags of the first processor, as the kernel tells them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        named.setdefault(name.strip(), value.strip())
    return named.get("model name", "unknown"), set(
        named.get("flags", named.get("Features", "")).split()
    )


def git(*words: str, repo: Path = REPO) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *words], cwd=repo, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit_of(repo: Path = REPO) -> str:
    """The newest commit that changed the package, and ``+`` if the work tree did since; ``+`` alone without git."""
    if not (repo / ".git").exists():
        return "+"
    changed = git("status", "--porcelain", "--", *PACKAGE, repo=repo)
    return git("log", "-1", "--format=%H", "--", *PACKAGE, repo=repo) + ("+" if changed else "")


def in_history(commit: str) -> bool:
    """Whether this clone has the commit."""
    return (
        subprocess.run(
            ["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=REPO, capture_output=True
        ).returncode
        == 0
    )


def checkout(commit: str, folder: Path) -> Path:
    """Put the package as it is in ``commit`` into ``folder``: an archive, since a worktree would be left in .git."""
    archive = subprocess.run(
        ["git", "archive", commit, *PACKAGE], cwd=REPO, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder
