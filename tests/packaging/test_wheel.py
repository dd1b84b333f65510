"""What ``pip install`` gives: built from a copy of the tree, and installed in a virtual environment of its own.

The environment borrows torch and the other requirements from the one that runs the tests, which ``pip`` may not go
beyond (``--no-index``): a requirement that our pins do not meet is an error. OpenPPO itself comes from the wheel.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from openppo import __version__

REPO = Path(__file__).parents[2]
SHIPPED = ("openppo", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
OPTIONAL = {"vllm": "vllm", "math_verify": "math", "flash_attn": "flash", "wandb": "wandb"}
"""Packages that are imported where an option asks for them, and the extra that installs each."""
DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Names of packages that differ from what they are imported as."""
Run = Callable[..., str]


def output(*command: str | Path, cwd: Path, **env: str) -> str:
    """Stdout of a command that must succeed, without our repository on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment | env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packages are made of, so that no build leaves traces in the repository or finds old ones."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*SHIPPED, "requirements.txt", "requirements-dev.txt"):
        path = REPO / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder / name)
    return folder


def build(source: Path, kind: str, out: Path) -> Path:
    """The package that setuptools makes of ``source``: ``kind`` is wheel or sdist."""
    program = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    output(sys.executable, "-c", program, f"build_{kind}", out, cwd=source)
    (package,) = out.iterdir()
    return package


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel: the folder of its programs."""
    folder = tmp_path_factory.mktemp("venv")
    output(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    programs = folder / "bin"
    found = output(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(found.strip()) / "borrowed.pth").write_text("\n".join(borrowed))  # its own .pth files are not read
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-index", "--quiet")
    output(*pip, wheel, cwd=folder, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    return programs


def names_in(wheel: Path) -> list[str]:
    """Files of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if ".dist-info/" not in name)


def metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def imported_packages() -> Iterator[str]:
    """Top-level modules from elsewhere that the package imports."""
    for file in (REPO / "openppo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                if name.split(".")[0] not in {*sys.stdlib_module_names, "openppo"}:
                    yield name.split(".")[0]


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    files = [path for path in (REPO / "openppo").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names_in(wheel) == sorted(str(path.relative_to(REPO)) for path in files)
    assert "openppo/py.typed" in names_in(wheel)


def test_the_source_package_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "requirements.txt"):
        assert (unpacked / name).is_file(), name
    again = build(unpacked, "wheel", tmp_path / "again")
    assert again.name == wheel.name
    assert names_in(again) == names_in(wheel)
    assert str(metadata(again)) == str(metadata(wheel))


def test_the_metadata_name_version_licence_and_a_description_whose_links_leave_the_page(wheel: Path) -> None:
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == ("openppo", __version__)
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert about["Description-Content-Type"] == "text/markdown"
    description = about.get_payload()
    assert description.startswith("# OpenPPO")
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    assert f"https://github.com/openppo/openppo/blob/v{__version__}/docs/data.md" in links


def test_every_package_that_is_imported_is_required_or_an_extra(wheel: Path) -> None:
    asked = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    required = {requirement.name.lower() for requirement in asked if requirement.marker is None}
    extras = {str(requirement.marker).split('"')[1] for requirement in asked if requirement.marker is not None}
    imported = set(imported_packages())
    needed = {DISTRIBUTIONS.get(name, name).lower() for name in imported - OPTIONAL.keys()}
    assert needed - required == set()
    assert {OPTIONAL[name] for name in imported & OPTIONAL.keys()} <= extras


def test_each_tested_pin_lies_in_the_range_of_the_package(wheel: Path) -> None:
    lines = (REPO / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    asked = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    ranges = {requirement.name: requirement.specifier for requirement in asked if requirement.marker is None}
    assert pins.keys() == ranges.keys()
    assert [name for name, pin in pins.items() if not ranges[name].contains(pin)] == []


def test_what_is_imported_is_the_installed_package_and_not_the_repository(installed: Path, tmp_path: Path) -> None:
    program = "import openppo, openppo.config, torch; print(openppo.__file__, torch.__file__, sep='\\n')"
    ours, borrowed = output(installed / "python", "-c", program, cwd=tmp_path).splitlines()
    assert Path(ours).is_relative_to(installed.parent)
    assert not Path(borrowed).is_relative_to(installed.parent)


def test_the_installed_program_lists_its_commands_and_answers_for_one(installed: Path, tmp_path: Path) -> None:
    commands = re.findall(r"^  (\w+)  ", output(installed / "openppo", "--help", cwd=tmp_path), flags=re.MULTILINE)
    assert {"train_ppo", "train_sft", "train_rm", "evaluate"} <= set(commands)
    printed = output(installed / "openppo", "train_ppo", "--help", cwd=tmp_path)  # of the others: tests/rules
    assert printed.lower().startswith("usage: openppo train_ppo")


def test_the_installed_version_is_that_of_the_package_without_a_commit(installed: Path, tmp_path: Path) -> None:
    first = output(installed / "openppo", "--version", cwd=tmp_path).splitlines()[0]
    assert first.split() == ["openppo", __version__]


def test_the_installed_program_trains(installed: Path, tmp_path: Path) -> None:
    make = [installed / "python", REPO / "examples" / "sort_letters.py", "make", "--out", tmp_path]
    output(*make, cwd=tmp_path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    flags = "--pretrain model --dataset sft.jsonl --max_len 32 --max_samples 8 --train_batch_size 4 --save_path out"
    command = [installed / "openppo", "train_sft", *flags.split()]
    output(*command, cwd=tmp_path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len((tmp_path / "out" / "logs" / "metrics.jsonl").read_text().splitlines()) == 2


USE = """
from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ReplayBuffer, get_advantages_and_returns
from openppo.models import PolicyLoss
from openppo.trainer import build_ppo_trainer

reveal_type(PolicyLoss().clip_eps)
reveal_type(get_advantages_and_returns)
reveal_type(ReplayBuffer().items)
reveal_type(from_options(TrainPPOConfig, pretrain="m").loss.eps_clip)
reveal_type(build_ppo_trainer(from_options(TrainPPOConfig)).step)
PolicyLoss(clip_eps="wide")
"""


@pytest.mark.slow  # a minute: mypy reads all of torch
def test_mypy_sees_the_types_of_public_names_from_another_project(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python"), "--output", "json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [*command, "--config-file=", "--ignore-missing-imports", "use.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    notes = [message["message"] for message in said if message["severity"] == "note"]
    errors = [message["code"] for message in said if message["severity"] == "error"]
    assert notes[0] == 'Revealed type is "float"', said
    assert "Tensor" in notes[1] and "lambd_critic" in notes[1]
    assert "list[openppo.types.Experience]" in notes[2]
    assert notes[3] == 'Revealed type is "float"'
    assert "dict[str, float]" in notes[4]
    assert errors == ["arg-type"], "only the wrong argument is one"
