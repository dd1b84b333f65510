"""The notebook runs as a reader runs it, in a kernel of its own, and what it keeps is small and of no machine."""

import json
import os
import re
from html import unescape
from pathlib import Path

import nbformat
import pytest

from tests.docs.conftest import REPO
from tests.docs.notebook import FILE, execute, tagged


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel finds this copy of the package, and no GPU."""
    python_path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", python_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def printed(notebook: nbformat.NotebookNode) -> str:
    """The text that cells print, without the log."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def shares(notebook: nbformat.NotebookNode) -> list[int]:
    """Per cent of held-out letters in the right place, before and after GRPO."""
    return [int(share) for share in re.findall(r"(\d+)% (?:before|after)", printed(notebook))]


def test_every_cell_runs_and_the_report_stands_in_the_last(tmp_path: Path) -> None:
    notebook = execute(FOLDER=str(tmp_path), SFT_STEPS=2, GRPO_STEPS=2)
    assert len(shares(notebook)) == 2
    (output,) = tagged(notebook, "report").outputs
    (page,) = re.findall(r'<iframe srcdoc="([^"]*)"', output.data["text/html"])
    assert unescape(page) == (tmp_path / "grpo" / "logs" / "report.html").read_text("utf-8")
    assert (tmp_path / "grpo" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_notebook_learns_as_it_says(tmp_path: Path) -> None:
    before, after = shares(execute(FOLDER=str(tmp_path)))
    kept = shares(nbformat.read(FILE, as_version=4))
    assert after > before + 15
    assert [before, after] == pytest.approx(kept, abs=8), "another processor rounds differently"


def test_the_notebook_keeps_its_numbers_and_nothing_of_a_machine() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    before, after = shares(notebook)
    assert after > before
    assert tagged(notebook, "report").outputs == [], "up to 5 MB"
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert all(cell.metadata.keys() <= {"tags"} for cell in notebook.cells)
    text = json.dumps(notebook)
    assert len(text) < 50_000
    assert re.findall(r"(?<![\w.:/])/(?:home|root|tmp|Users|work)\b[^\s\"]*", text) == []


def test_links_of_the_notebook_lead_to_files() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)", prose)
    assert len(links) > 3
    assert [link for link in links if not (FILE.parent / link).is_file()] == []
