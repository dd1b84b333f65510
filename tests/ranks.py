"""The ranks of a process group as threads of one process."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_SECONDS = 60
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class ThreadComm:
    """``openppo.types.Comm`` of a rank that is a thread; ``values`` holds a place for each rank."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return functools.reduce(_COMBINE[op], self.all_gather_object(tensor.clone()))

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(_SECONDS)
        gathered = list(self._values)
        self._barrier.wait(_SECONDS)  # before a rank writes again
        return gathered


def on_ranks(
    n: int, work: Callable[[ThreadComm], Any], errors: tuple[type[Exception], ...] = (ValueError,)
) -> list[Any]:
    """What ``work`` returns, or which of ``errors`` it raises, on each of ``n`` ranks."""
    values, barrier = [None] * n, threading.Barrier(n)

    def run(rank: int) -> Any:
        try:
            return work(ThreadComm(rank, values, barrier))
        except errors as error:
            return error

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(run, range(n)))
