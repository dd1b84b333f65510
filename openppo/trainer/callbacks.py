"""Hooks for users' code while a trainer runs: log, read evaluations, stop early."""

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from openppo import logger
from openppo.config import Condition
from openppo.tracking.report.catalog import GROUPS, matches

STOPPED_EARLY = "the run had stopped early: its model is saved, and it does not resume"

PPOTrainer: TypeAlias = Any
"""An ``openppo.trainer.PPOTrainer``, whose module imports this one."""


class Callback:
    """Does nothing at each point of ``PPOTrainer.fit()``; override what you need.

    Every method runs on all ranks, with metrics that are the same on all of them. Print or write files only where
    ``trainer.comm.rank == 0``; call models on all ranks or on none. ``trainer.should_stop = True`` ends ``fit()``
    after the step under way, with everything saved, as soon as one rank sets it.
    """

    def on_fit_start(self, trainer: PPOTrainer) -> None:
        """Before the first step, and before an evaluation that precedes it."""

    def on_step_end(self, trainer: PPOTrainer, metrics: dict[str, float]) -> None:
        """After each global step, with its metrics; ``trainer.global_step`` counts from 1 here."""

    def on_evaluate(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        """After each evaluation, with its metrics."""

    def on_save(self, trainer: PPOTrainer, folder: Path) -> None:
        """After a model was written to ``folder``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint, as JSON, the same on all ranks.

        It is restored by class.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the result of ``state_dict``, before ``on_fit_start``."""

    def on_fit_end(self, trainer: PPOTrainer) -> None:
        """After the last step, when the trained model is saved."""


class EarlyStopping(Callback):
    """Stops when ``metric`` has not improved for ``patience`` reports in a row.

    It has improved if it is better than the best by more than ``min_delta``. Reports are the steps that have the
    metric; a metric of evaluations, "eval...", is in evaluated steps alone. ``mode`` is "max" if larger is better,
    "min" if smaller is.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        if patience < 1 or mode not in ("max", "min") or min_delta < 0:
            wanted = "patience of at least 1, mode 'max' or 'min', and min_delta of at least 0"
            raise ValueError(
                f"EarlyStopping needs {wanted}; got {patience}, {mode!r}, {min_delta}."
            )
        check_metric(metric, "EarlyStopping")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1 if mode == "max" else -1
        self.best = -self.sign * math.inf
        self.n_without = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "n_without": self.n_without}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]
        self.n_without = state["n_without"]

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            return
        value = metrics[self.metric]
        self.n_without += 1
        if self.sign * (value - self.best) > self.min_delta:  # false for NaN
            self.best = value
            self.n_without = 0
        elif self.n_without >= self.patience:
            trainer.should_stop = True
            logger.info(
                "stopping early: %s has not been better than %.4g for %d reports",
                self.metric,
                self.best,
                self.patience,
            )


class StopWhen(Callback):
    """Stops when one of ``conditions`` holds, as ``--stop_when`` states them."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = list(conditions)
        self.stopped_by: str | None = None
        self._warned: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"stopped_by": self.stopped_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stopped_by = state.get("stopped_by")

    def on_fit_start(self, trainer: PPOTrainer) -> None:
        if self.stopped_by is None:
            return
        trainer.should_stop = self.stopped_by in [condition.text for condition in self.conditions]
        if not trainer.should_stop:
            logger.info("--stop_when %s is not given any more: the run resumes", self.stopped_by)
            self.stopped_by = None

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        for condition in self.conditions:
            if condition.holds(metrics):
                logger.info(
                    "--stop_when %s: %s is %.4g at step %d; the run ends",
                    condition.text,
                    condition.metric,
                    metrics[condition.metric],
                    trainer.global_step,
                )
                self.stopped_by = condition.text
                trainer.should_stop = True
                return
            self._warn_if_missing(condition, metrics)

    def _warn_if_missing(self, condition: Condition, metrics: Mapping[str, float]) -> None:
        """Warn once; the policy's metrics come later while only the critic learns."""
        if condition.metric.startswith("eval") or condition.metric in metrics:
            return
        if condition.text in self._warned:
            return
        self._warned.add(condition.text)
        logger.warning(
            "--stop_when %s: no such metric yet among %s",
            condition.text,
            ", ".join(sorted(metrics)),
        )


def check_metric(metric: str, where: str) -> None:
    """Raise ``ValueError`` for a metric that no run has; the message begins with its user, ``where``."""
    known = [name for charts in GROUPS.values() for chart in charts for name in chart.metrics]
    if not any(matches(metric, pattern) for pattern in known):
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/metrics.md lists them."
        raise ValueError(f"{where}: there is no metric {metric}; {hint}")


def notify(callbacks: Sequence[Callback], hook: str, *arguments: Any) -> None:
    """Call the method ``hook`` of each callback."""
    for callback in callbacks:
        getattr(callback, hook)(*arguments)


def restore_callbacks(callbacks: Sequence[Callback], saved: Sequence[dict[str, Any]]) -> bool:
    """Restore callbacks by class, in order; return True if the classes are those of ``saved``."""
    saved_names = [state["class"] for state in saved]
    names = [type(callback).__name__ for callback in callbacks]
    unused = list(saved)
    for callback, name in zip(callbacks, names, strict=True):
        state = next((state for state in unused if state["class"] == name), None)
        if state is not None:
            unused.remove(state)
            callback.load_state_dict(state["state"])

    if saved_names != names:
        logger.warning(
            "callbacks were %s and are %s: those of one class resume in their order, others start anew",
            ", ".join(saved_names) or "none",
            ", ".join(names) or "none",
        )
    return saved_names == names
