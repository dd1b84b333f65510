"""The page on what was run where is what its script writes, from tables that name device and versions."""

import re
import runpy
from pathlib import Path

import pytest

from tests.docs.conftest import REPO

RESULTS = sorted((REPO / "benchmarks" / "results").glob("*.md"))
NOT = r"\bnot (?:yet )?(?:been )?(?:run|measured)"
DOUBTS = re.compile(rf"{NOT}[^.|]*\bGPUs?\b|\bGPUs?\b[^.|]*{NOT}", flags=re.IGNORECASE)


def test_the_page_is_what_its_script_writes() -> None:
    script = runpy.run_path(str(REPO / "benchmarks" / "tested.py"))
    assert script["page"]() == (REPO / "docs" / "tested.md").read_text()


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_table_begins_with_device_and_versions(file: Path) -> None:
    head = file.read_text().splitlines()[:8]
    assert head[0].startswith("# ")
    assert [
        name
        for name in ("- Device: ", "- Versions: ")
        if not any(line.startswith(name) for line in head)
    ] == []


def test_one_page_alone_says_what_was_not_run_on_gpus() -> None:
    pages = {REPO / "README.md", *(REPO / "docs").rglob("*.md")} - {REPO / "docs" / "tested.md"}
    doubts = {page.name: DOUBTS.findall(" ".join(page.read_text().split())) for page in pages}
    assert {name: doubt for name, doubt in doubts.items() if doubt} == {}
