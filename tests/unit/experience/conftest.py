"""Trajectories by hand, and ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from openppo.types import FinishReason, Prompt, Trajectory

PATIENCE = 20  # seconds until ranks that wait for each other give up


class ThreadComm:
    """``Comm`` of ranks that are threads. What each rank gives is shared through ``slots``."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(PATIENCE)
        gathered = list(self._slots)
        self._barrier.wait(PATIENCE)
        return gathered

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        stacked = torch.stack(self.all_gather_object(tensor))
        return {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]


OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


@pytest.fixture
def on_ranks() -> OnRanks:
    """Runs ``work(comm)`` on as many ranks as asked for; gives back what each of them returned."""

    def run(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
        slots, barrier = [None] * world_size, threading.Barrier(world_size)
        results: list[Any] = [None] * world_size
        errors: list[Exception] = []

        def of_rank(rank: int) -> None:
            try:
                results[rank] = work(ThreadComm(rank, slots, barrier))
            except Exception as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if errors:
            raise errors[0]
        return results

    return run


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Builds a trajectory from prompt ids, response ids and, unless all of the response is, what is an action."""

    def make(
        prompt: list[int],
        response: list[int],
        actions: list[int] | None = None,
        reason: FinishReason = FinishReason.STOP,
        **scores: float,
    ) -> Trajectory:
        mask = [False] * len(prompt) + [bool(a) for a in (actions or [1] * len(response))]
        return Trajectory(
            token_ids=prompt + response,
            action_mask=mask,
            log_probs=[-0.5 - 0.125 * t if is_action else 0.0 for t, is_action in enumerate(mask)],
            versions=[0 if is_action else -1 for is_action in mask],
            finish_reason=reason,
            prompt=Prompt(text="", token_ids=prompt),
            group=0,
            scores=scores,
        )

    return make
