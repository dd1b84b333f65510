"""The notebook of the quickstart: ``python -m tests.docs.notebook`` runs it and keeps what it prints, to commit.

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


def printed(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """What a cell printed, as one output; the log on stderr, which names folders of a machine, is left out."""
    texts = [output.text for output in cell.outputs if output.get("name") == "stdout"]
    return [nbformat.v4.new_output("stream", text="".join(texts))] if texts else []


def record() -> None:
    """Run the notebook as it is, and write what it prints into the file."""
    executed = execute()
    kept = nbformat.read(FILE, as_version=4)
    for cell, run in zip(kept.cells, executed.cells, strict=True):
        if cell.cell_type == "code" and "report" not in cell.metadata.get("tags", ()):
            cell.outputs = printed(run)
            cell.execution_count = run.execution_count
    nbformat.write(kept, FILE)


if __name__ == "__main__":
    record()
