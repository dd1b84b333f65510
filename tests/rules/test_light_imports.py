"""What is light to use is light to import; checked in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CLI = REPO / "openppo" / "cli"

HEAVY = {"torch", "transformers", "deepspeed", "peft", "datasets", "vllm"}
TRAINING_STACK = HEAVY - {"torch"}


def fresh_python(*arguments: str, path: Path = REPO) -> subprocess.CompletedProcess[str]:
    """Run Python with our package on its path, away from the repository folder."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd="/", capture_output=True, text=True, timeout=300
    )


def loaded_by(statement: str, path: Path = REPO) -> set[str]:
    """Top-level modules in ``sys.modules`` after ``statement``."""
    result = fresh_python("-c", f"{statement}\nimport sys\nprint('LOADED', *sys.modules)", path=path)
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in result.stdout.split("LOADED", 1)[1].split()}


def imported_by_command(module: str, *arguments: str, path: Path = REPO) -> tuple[str, set[str]]:
    """What ``python -m module arguments`` prints, and the top-level modules that it imports."""
    result = fresh_python("-X", "importtime", "-m", module, *arguments, path=path)
    lines = result.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    assert result.returncode == 0, "\n".join(line for line in lines if line not in times)
    return result.stdout, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in times}


def commands() -> list[str]:
    """Modules of openppo.cli that can be run; train_ppo always."""
    runnable = {file.stem for file in CLI.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    return sorted(runnable | {"train_ppo"})


@pytest.mark.parametrize("statement", ["import openppo", "import openppo.config"])
def test_the_package_and_its_config_load_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) & HEAVY == set()


@pytest.mark.parametrize("statement", ["import openppo.models.loss", "from openppo.models import PolicyLoss"])
def test_the_losses_need_torch_and_nothing_else_of_weight(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "torch" in loaded
    assert loaded & TRAINING_STACK == set()


@pytest.mark.parametrize("command", commands())
def test_help_answers_without_loading_anything_heavy(command: str) -> None:
    printed, loaded = imported_by_command(f"openppo.cli.{command}", "--help")
    assert "usage" in printed.lower()
    assert loaded & HEAVY == set()


def test_the_checkers_see_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "heavy_command.py").write_text("import sys\nimport torch\nprint('usage', *sys.argv[1:])\n")
    assert "torch" in loaded_by("import heavy_command", path=tmp_path)
    printed, loaded = imported_by_command("heavy_command", "--help", path=tmp_path)
    assert printed == "usage --help\n"
    assert "torch" in loaded
