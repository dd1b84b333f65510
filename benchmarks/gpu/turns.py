"""What both sides of the stage ``peers`` have: answers on stdout, and what a step is made of."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.rows import DRY

GROUP = 2 if DRY else 8
"""Responses to each prompt."""


def answers() -> TextIO:
    """The stream of answers; what libraries print goes to stderr from here on."""
    os.environ.setdefault(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    )  # as the command sets it
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def answer(stream: TextIO, **row: Any) -> None:
    """Write a row."""
    stream.write(json.dumps(row) + "\n")
    stream.flush()


def folders() -> Iterator[Path]:
    """The assets, and a folder for the run, from the command line."""
    return map(Path, sys.argv[1:3])
