"""What a generation engine is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from openppo.types import Completion, SamplingParams


class Engine(Protocol):
    """Token ids in; token ids, log-probs of the distribution sampled from, and finish reason out.

    Requests enter one by one with ``submit``; each ``step`` advances what is under way by one forward pass;
    ``collect`` hands out what has ended. ``generate`` runs that loop for a batch. ``version`` counts the policy's
    updates; the owner of the weights sets it.
    """

    version: int

    @property
    def busy(self) -> bool:
        """True while a request waits or is being decoded."""
        ...

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Queue a request and return its number. The response depends on ``seed``, not on its neighbours."""
        ...

    def step(self) -> None:
        """One forward pass: decode, or take in waiting requests."""
        ...

    def collect(self) -> dict[int, Completion]:
        """Completions that ended since the last call, by request number."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        """Submit all, step until all ended; completions in the order of ``prompts``."""
        ...
