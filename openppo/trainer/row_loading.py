"""Loading of rows on all ranks: once per host, with a sign of progress."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from openppo.config import RowsConfig
from openppo.strategy.comm import collective
from openppo.tracking import (
    progress_bar,
)
from openppo.types import Comm

if TYPE_CHECKING:  # commands that do not train need no DeepSpeed
    from openppo.datasets import ShowRows


T = TypeVar("T")


def tokenizing(comm: Comm) -> ShowRows:
    """For loaders of data: a bar on rank 0, and a sign of progress from all."""
    return lambda rows: progress_bar(rows, "tokenizing", enabled=comm.rank == 0)


def once_per_host(comm: Comm, options: RowsConfig, load: Callable[[], T]) -> T:
    """``load()`` on all ranks; with ``--dataset_num_proc`` on the first of each host first, whose cache others read."""
    made: T | None = None
    if options.dataset_num_proc > 0:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        made = collective(comm, lambda: load() if is_first else None)
    return collective(comm, lambda: load() if made is None else made)
