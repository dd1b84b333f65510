"""The notebook of the quickstart: ``python -m tests.docs.notebook`` runs it and keeps its outputs, to commit.

The report in the last cell is not kept: it has up to 5 MB, and sites that show notebooks leave frames out.
"""

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FILE = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def tagged(notebook: nbformat.NotebookNode, tag: str) -> nbformat.NotebookNode:
    """The cell with a tag."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", ()))
    return cell


def execute(**parameters: str | int) -> nbformat.NotebookNode:
    """Run every cell, with other ``parameters``; an error in a cell is raised here."""
    notebook = nbformat.read(FILE, as_version=4)
    cell = tagged(notebook, "parameters")
    for name, value in parameters.items():
        cell.source, n = re.subn(rf"^{name} = \S+", f"{name} = {value!r}", cell.source, flags=re.M)
        assert n == 1, name
    NotebookClient(notebook, resources={"metadata": {"path": FILE.parent}}).execute()
    return notebook


def record() -> None:
    """Run the notebook as it is, and write its outputs into the file."""
    executed = execute()
    kept = nbformat.read(FILE, as_version=4)
    for cell, run in zip(kept.cells, executed.cells, strict=True):
        if cell.cell_type == "code" and "report" not in cell.metadata.get("tags", ()):
            cell.outputs = run.outputs
            cell.execution_count = run.execution_count
    nbformat.write(kept, FILE)


if __name__ == "__main__":
    record()
