"""A copy of what packages are made of, and programs that run without our repository on Python's path."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SHIPPED = (
    "openppo",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)


def output(*command: str | Path, cwd: Path, **env: str) -> str:
    """Stdout of a command that must succeed, without our repository on Python's path."""
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | env
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def build(source: Path, kind: str, out: Path) -> Path:
    """The package that setuptools makes of ``source``: ``kind`` is wheel or sdist."""
    program = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    output(sys.executable, "-c", program, f"build_{kind}", out, cwd=source)
    (package,) = out.iterdir()
    return package


def names_in(wheel: Path) -> list[str]:
    """Files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packages are made of, so that no build leaves traces in the repository or finds old ones."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(
        REPO / "openppo", folder / "openppo", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in (*SHIPPED[1:], "requirements.txt", "requirements-dev.txt"):
        shutil.copy(REPO / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))
