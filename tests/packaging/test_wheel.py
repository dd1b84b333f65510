"""What ``pip install`` gives: built from a copy of the tree, and installed in a virtual environment of its own.

The environment borrows torch and the other requirements from the one that runs the tests, which ``pip`` may not go
beyond (``--no-index``): a requirement that our pins do not meet is an error. OpenPPO itself comes from the wheel.
"""

import ast
import re
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from openppo import __version__
from tests.packaging.conftest import REPO, build, names_in, output

OPTIONAL = {
    "liger_kernel": "gpu",
    "triton": "gpu",
    "vllm": "vllm",
    "math_verify": "math",
    "flash_attn": "flash",
    "wandb": "wandb",
    "av": "vision",
}
"""Packages that are imported where an option asks for them, and the extra that installs each."""
TESTED_EXTRAS = ("dev", "docs", "gpu", "math", "wandb")
OTHER_EXTRAS = ("flash", "vision", "vllm")
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}
"""Names of packages that differ from what they are imported as."""


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel: the folder of its programs."""
    folder = tmp_path_factory.mktemp("venv")
    output(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    programs = folder / "bin"
    found = output(
        programs / "python",
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder,
    )
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(found.strip()) / "borrowed.pth").write_text(
        "\n".join(borrowed)
    )  # its own .pth files are not read
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--no-index",
        "--quiet",
    )
    output(*pip, wheel, cwd=folder, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    return programs


def metadata(wheel: Path) -> Message:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_and_source_package_hold_every_file_and_nothing_else(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    files = [
        path
        for path in (REPO / "openppo").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert names_in(wheel) == sorted(str(path.relative_to(REPO)) for path in files)
    assert "openppo/py.typed" in names_in(wheel)
    with tarfile.open(build(source, "sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "requirements.txt"} <= {
        path.name for path in unpacked.iterdir()
    }
    again = build(unpacked, "wheel", tmp_path / "again")
    assert (again.name, names_in(again), str(metadata(again))) == (
        wheel.name,
        names_in(wheel),
        str(metadata(wheel)),
    )


def test_the_metadata_name_version_licence_and_a_description_whose_links_leave_the_page(
    wheel: Path,
) -> None:
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


def test_every_imported_package_is_required_or_an_extra_and_each_pin_lies_in_its_range(
    wheel: Path,
) -> None:
    nodes = [
        n
        for file in (REPO / "openppo").rglob("*.py")
        for n in ast.walk(ast.parse(file.read_text("utf-8")))
    ]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    imported = {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "openppo"}
    asked = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist", [])]
    ranges = {
        requirement.name: requirement.specifier
        for requirement in asked
        if requirement.marker is None
    }
    extras = {
        str(requirement.marker).split('"')[1]
        for requirement in asked
        if requirement.marker is not None
    }
    assert {DISTRIBUTIONS.get(name, name).lower() for name in imported - OPTIONAL.keys()} <= set(
        map(str.lower, ranges)
    )
    assert {OPTIONAL[name] for name in imported & OPTIONAL.keys()} <= extras
    lines = (REPO / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert pins.keys() == ranges.keys()
    assert [name for name, pin in pins.items() if not ranges[name].contains(pin)] == []


def test_the_installed_program_is_that_of_the_wheel_and_trains(
    installed: Path, tmp_path: Path
) -> None:
    program = (
        "import openppo, openppo.config, torch; print(openppo.__file__, torch.__file__, sep='\\n')"
    )
    ours, borrowed = output(installed / "python", "-c", program, cwd=tmp_path).splitlines()
    assert Path(ours).is_relative_to(installed.parent)
    assert not Path(borrowed).is_relative_to(installed.parent)
    commands = re.findall(
        r"^  (\w+)  ", output(installed / "openppo", "--help", cwd=tmp_path), flags=re.MULTILINE
    )
    assert {"train_ppo", "train_sft", "train_rm", "evaluate"} <= set(commands)
    said = output(installed / "openppo", "--version", cwd=tmp_path).splitlines()[0]
    assert said.split() == ["openppo", __version__], "without a commit"
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    make = [REPO / "examples" / "sort_letters.py", "make", "--out", tmp_path]
    output(installed / "python", *make, cwd=tmp_path, **cpu)
    flags = "--pretrain model --dataset sft.jsonl --max_len 32 --max_samples 8 --train_batch_size 4 --save_path out"
    output(installed / "openppo", "train_sft", *flags.split(), cwd=tmp_path, **cpu)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert len((tmp_path / "out" / "logs" / "metrics.jsonl").read_text().splitlines()) == 2


def install(wheel: Path, extras: Iterable[str], programs: Path, *options: str) -> None:
    """Let pip resolve a wheel with extras for the environment of ``programs``, and install nothing."""
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--dry-run"]
    output(*pip, *options, f"{wheel}[{','.join(extras)}]", cwd=wheel.parent)


def test_extras_of_the_test_environment_agree_with_the_pins(installed: Path, wheel: Path) -> None:
    extras = metadata(wheel).get_all("Provides-Extra", [])
    assert sorted(extras) == sorted([*TESTED_EXTRAS, *OTHER_EXTRAS])
    install(wheel, TESTED_EXTRAS, installed, "--no-index")


@pytest.mark.slow
@pytest.mark.parametrize("extra", OTHER_EXTRAS)
def test_other_extras_resolve_from_the_index(extra: str, wheel: Path, tmp_path: Path) -> None:
    if extra == "flash":
        pytest.skip("flash-attn says what it needs only where it is built: with torch and nvcc")
    output(sys.executable, "-m", "venv", "--without-pip", tmp_path, cwd=tmp_path)
    install(wheel, [extra], tmp_path / "bin")
