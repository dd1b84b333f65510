"""Faces of the packages: each name is written once and loads on first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import openppo

PACKAGE = Path(openppo.__file__).parent
FACES = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py") if "lazy_names" in file.read_text())


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_loads_and_no_module_hides_it(face: str) -> None:
    package = import_module(f"openppo.{face}")
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is getattr(package, name)
        assert not (PACKAGE / face / f"{name}.py").exists(), "the import of this module would replace the name"
    with pytest.raises(AttributeError, match=f"module 'openppo.{face}' has no attribute 'nothing'"):
        _ = package.nothing


def test_type_checkers_know_the_public_names(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text("from openppo.models import PolicyLoss\nreveal_type(PolicyLoss())\n")
    options = ("--strict", "--follow-imports=silent", "--ignore-missing-imports")
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        env={"MYPYPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 'Revealed type is "openppo.models.loss.PolicyLoss"' in checked.stdout, checked.stdout
