"""Options of rollouts that do not wait for the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openppo.config.fields import Options, at_least, not_negative, option


@dataclass(frozen=True)
class OrchestratorConfig(Options):
    """Ranks that sample, and how far they may run ahead."""

    rollout_ranks: int = option(0, not_negative)
    """Number of ranks, the last ones, that only sample while the others train (0: each rank does both in turn)."""
    max_staleness: int = option(0, not_negative)
    """Global steps, at most, from the weights that sample a token to those it trains; above 0 nothing waits."""
    sync_every: int = option(1, at_least(1), needs="rollout_ranks")
    """With --rollout_ranks: global steps between two transfers of weights."""
    running_requests: Literal["continue", "drain", "abort"] = "continue"
    """When new weights come, requests under way continue with them, finish first (drain) or start again (abort)."""
    stale: Literal["drop", "mask"] = option("drop", of_files=True)
    """Drop episodes with tokens older than --max_staleness, or mask only those tokens."""
    reset_optimizer_on_sync: bool = option(False, of_files=True)
    """Zero the moments and the step count of the actor's Adam whenever samplers get new weights (GLM-5)."""
    tasks: str | None = option(None, place=True, resume="must match")
    """YAML file of several tasks with agent, data, reward and ratio of each, in place of --prompt_data."""

    task_ratios: str | None = option(None, place=True, needs="tasks", of_files=True)
    """New ratios at each step: success, speed, or path.py:name of a function (default: as --tasks gives them)."""

    @property
    def is_async(self) -> bool:
        """True if sampling and training run side by side."""
        return self.rollout_ranks > 0 or self.max_staleness > 0 or self.tasks is not None

    def problems(self) -> Iterator[str]:
        if self.sync_every > self.max_staleness + 1:
            yield (
                f"--sync_every {self.sync_every}: between two transfers of weights every sample would become older "
                f"than --max_staleness {self.max_staleness} allows: use at most {self.max_staleness + 1}."
            )
        if self.reset_optimizer_on_sync and not self.is_async:
            yield "reset_optimizer_on_sync needs --rollout_ranks or --max_staleness: otherwise nothing is synced."
