"""Files of responses: all lines or none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from openppo.types import Comm


def check_output(path: str) -> Path:
    """The file of ``--output_path``, with its folder made; ``ValueError`` if nothing can be written there."""
    output = Path(path).expanduser()
    if output.is_dir():
        raise ValueError(f"--output_path {path} is a folder: name a file in it.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise ValueError(f"--output_path {path}: cannot be written ({error}); choose another folder.") from error
    return output


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], comm: Comm) -> None:
    """Write the rows of all ranks, in rank order, as lines of JSON; collective.

    They have another name until all are written, so that a file of the name ``path`` is always whole.
    """
    of_ranks = comm.all_gather_object(rows)
    if comm.rank != 0:
        return
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
        for row in (row for of_rank in of_ranks for row in of_rank):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    os.replace(unfinished, path)
