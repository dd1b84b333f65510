"""What a user's own code may do while a trainer runs: log, look at evaluations, stop early."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from openppo.config import Condition
from openppo.trainer.stopping import StopConditions

if TYPE_CHECKING:
    from openppo.trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger("openppo")


class Callback:
    """Does nothing at each point of ``PPOTrainer.fit()``; override what you need.

    Every method runs on all ranks, with metrics that are the same on all of them. Print or write files only where
    ``trainer.comm.rank == 0``; call models on all ranks or on none. ``trainer.should_stop = True`` ends ``fit()``
    after the step under way, with everything saved, as soon as one rank sets it.
    """

    def on_fit_start(self, trainer: PPOTrainer) -> None:
        """Before the first step, and before an evaluation that precedes it."""

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """After each global step, with its metrics; ``trainer.global_step`` counts from 1 here."""

    def on_evaluate(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """After each evaluation, with its metrics."""

    def on_save(self, trainer: PPOTrainer, folder: Path) -> None:
        """After a model was written to ``folder``."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback, as JSON; alike on all ranks. It is found again by its class."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; before ``on_fit_start``."""

    def on_fit_end(self, trainer: PPOTrainer) -> None:
        """After the last step, when the trained model is saved."""


class EarlyStopping(Callback):
    """Stops when ``metric`` has not become better by more than ``min_delta`` for ``patience`` reports in a row.

    A metric whose name starts with "eval" is looked for in evaluations, any other in the metrics of each step.
    ``mode`` says whether better is larger or smaller.
    """

    def __init__(self, metric: str, patience: int, mode: Literal["max", "min"] = "max", min_delta: float = 0.0) -> None:
        if patience < 1 or mode not in ("max", "min") or min_delta < 0:
            raise ValueError(
                "EarlyStopping needs patience of at least 1, mode 'max' or 'min', and min_delta of at least 0; got "
                f"{patience}, {mode!r}, {min_delta}."
            )
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self.best = -math.inf if mode == "max" else math.inf
        self.n_without = 0
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {"best": self.best, "n_without": self.n_without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier session."""
        self.best, self.n_without = state["best"], state["n_without"]

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """Look at a metric of training."""
        if not self.metric.startswith("eval"):
            self._look(trainer, metrics)

    def on_evaluate(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """Look at a metric of evaluation."""
        if self.metric.startswith("eval"):
            self._look(trainer, metrics)

    def _look(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:  # some come later, such as the policy's while only the critic learns
            if not self._has_warned:
                self._has_warned = True
                logger.warning("EarlyStopping: no metric %s yet among %s", self.metric, ", ".join(metrics))
            return
        value = metrics[self.metric]
        gain = value - self.best if self.mode == "max" else self.best - value
        if gain > self.min_delta:  # false for NaN
            self.best, self.n_without = value, 0
            return
        self.n_without += 1
        if self.n_without >= self.patience:
            trainer.should_stop = True
            logger.info(
                "stopping early: %s has not been better than %.4g for %d reports", self.metric, self.best, self.patience
            )


class StopWhen(Callback):
    """Stops when one of ``conditions`` holds, as ``--stop_when`` states them."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.stopping = StopConditions(conditions)
        self.stopped_by: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Which one has ended the run."""
        return {"stopped_by": self.stopped_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from an earlier session."""
        self.stopped_by = state["stopped_by"]

    def on_fit_start(self, trainer: PPOTrainer) -> None:
        """Resume a run that a condition ended which is not given now."""
        if self.stopped_by is not None and not self.stopping.still_stops(self.stopped_by):
            logger.info("--stop_when %s is not given any more: the run resumes", self.stopped_by)
            trainer.should_stop, self.stopped_by = False, None

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """Check metrics of training."""
        self._look(trainer, metrics, of_evaluation=False)

    def on_evaluate(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """Check metrics of evaluation."""
        self._look(trainer, metrics, of_evaluation=True)

    def _look(self, trainer: PPOTrainer, metrics: Mapping[str, float], of_evaluation: bool) -> None:
        found = self.stopping.first_true(metrics, trainer.global_step, of_evaluation)
        if found is not None:
            self.stopped_by, trainer.should_stop = found, True
