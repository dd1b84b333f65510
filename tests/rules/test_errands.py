"""Errands that people send us on: each is a patch of few files, applied to a copy of the package and tried."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ERRANDS = sorted((REPO / "tests/rules/errands").glob("*.patch"))
MOST_EDITED = 2
MOST_NEW = 1


@pytest.mark.parametrize("patch", ERRANDS, ids=lambda patch: patch.stem)
def test_an_errand_edits_two_files_and_adds_one_at_most(patch: Path) -> None:
    text = patch.read_text()
    edited = re.findall(r"^--- a/(.*)$", text, flags=re.MULTILINE)
    added = re.findall(r"^--- /dev/null$", text, flags=re.MULTILINE)
    assert 0 < len(edited) <= MOST_EDITED
    assert len(added) <= MOST_NEW
    assert all(file.startswith("openppo/") for file in edited)


@pytest.mark.parametrize("patch", ERRANDS, ids=lambda patch: patch.stem)
def test_an_errand_works_in_a_copy_of_the_package(patch: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "openppo", tmp_path / "openppo", ignore=ignored)
    check = [sys.executable, patch.with_suffix(".py")]
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    without = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True)
    assert without.returncode != 0, "the check must fail without the patch"
    subprocess.run(["git", "apply", patch], cwd=tmp_path, check=True)
    ended = subprocess.run(check, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_errands_are_those_of_samples_inputs_players_filters_and_options() -> None:
    assert [patch.stem for patch in ERRANDS] == [
        "authors_of_tokens",
        "group_median",
        "length_reward",
        "mean_reward_range",
        "player_of_revisions",
    ]
