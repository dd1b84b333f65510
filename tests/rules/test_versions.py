"""Setup, pins, the script of the lowest versions and the docs name the same versions."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FIRST_HOUR = " ".join((REPO / "docs" / "first-hour.md").read_text().split())
LOWEST = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', (REPO / "setup.py").read_text()))
PINNED = dict(
    re.findall(
        r"^([\w-]+)==(\d+\.\d+)", (REPO / "requirements.txt").read_text(), flags=re.MULTILINE
    )
)
PAGES = [REPO / "README.md", *(REPO / "docs").rglob("*.md"), REPO / "CONTRIBUTING.md"]


def test_the_first_hour_names_the_lowest_and_the_pinned_versions() -> None:
    assert f"torch {LOWEST['torch']} and {PINNED['torch']}" in FIRST_HOUR
    assert f"transformers {LOWEST['transformers']} to {PINNED['transformers']}" in FIRST_HOUR


def test_setup_names_the_versions_that_were_tested() -> None:
    text = (REPO / "setup.py").read_text()
    for name in ("torch", "transformers"):
        assert f"# tested with {LOWEST[name]} and {PINNED[name]}" in text


def test_the_script_of_the_lowest_versions_installs_those_of_setup() -> None:
    script = (REPO / "tests" / "lowest.sh").read_text()
    (program,) = re.findall(r"<< 'EOF'\n(.*?)^EOF", script, flags=re.DOTALL | re.MULTILINE)
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True
    )
    pins = dict(line.split("==") for line in printed.stdout.split())
    assert {name: pins[name] for name in ("torch", "transformers")} == {
        name: LOWEST[name] for name in ("torch", "transformers")
    }


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_no_page_asks_for_an_older_minimum(name: str) -> None:
    pattern = rf"\b(?:PyTorch|{name}) ?(?:>=|from) ?(\d+\.\d+)"
    named = {page.name: re.findall(pattern, page.read_text()) for page in PAGES}
    assert {
        page: set(versions) for page, versions in named.items() if set(versions) - {LOWEST[name]}
    } == {}
