"""Loading of rows on all ranks: once per host, with a sign of progress."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from openppo.config import RowsConfig
from openppo.strategy.comm import collective
from openppo.tracking import progress_bar
from openppo.types import Comm

if TYPE_CHECKING:
    from openppo.datasets import ShowRows

T = TypeVar("T")


def tokenizing(comm: Comm) -> ShowRows:
    """Progress of a loader: a bar on rank 0, a sign of life from all ranks."""
    return lambda rows: progress_bar(rows, "tokenizing", enabled=comm.rank == 0)


def once_per_host(comm: Comm, options: RowsConfig, load: Callable[[], T]) -> T:
    """Return ``load()`` of each rank.

    With ``--dataset_num_proc`` the first rank of each host loads before the others, which then read its cache.
    """
    loaded: T | None = None
    if options.dataset_num_proc > 0:
        is_first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
        loaded = collective(comm, lambda: load() if is_first_of_host else None)
    return collective(comm, lambda: load() if loaded is None else loaded)
