"""What a user's own code may do while a trainer runs: log, look at evaluations, stop early."""

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from openppo.config import Condition
from openppo.tracking.report.catalog import GROUPS, matches

logger = logging.getLogger("openppo")

PPOTrainer: TypeAlias = Any
"""An ``openppo.trainer.PPOTrainer``, whose module imports this one."""
_KNOWN = [name for charts in GROUPS.values() for chart in charts for name in chart.metrics]


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
        """Resume from what ``state_dict`` gave; before ``on_fit_start``."""

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


def check_conditions(conditions: Sequence[Condition]) -> None:
    """Raise ``ValueError`` for a metric that no run has."""
    for condition in conditions:
        if not any(matches(condition.metric, pattern) for pattern in _KNOWN):
            near = difflib.get_close_matches(condition.metric, _KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/metrics.md lists them."
            raise ValueError(f"--stop_when {condition.text!r}: there is no metric {condition.metric}; {hint}")


class StopConditions:
    """Conditions of which the first that holds ends a run."""

    def __init__(self, conditions: Sequence[Condition]) -> None:
        self.conditions = list(conditions)
        self._warned: set[str] = set()

    def first_true(self, metrics: Mapping[str, float], step: int, of_evaluation: bool | None = None) -> str | None:
        """Text of the first condition that holds, logged; else None.

        ``of_evaluation`` says which metrics ``metrics`` are: held-out ones, those of a step, or (None) both.
        """
        for each in self.conditions:
            is_held_out = each.metric.startswith("eval")
            if of_evaluation is not None and is_held_out != of_evaluation:
                continue
            if each.holds(metrics):
                value = metrics[each.metric]
                logger.info("--stop_when %s: %s is %.4g at step %d; the run ends", each.text, each.metric, value, step)
                return each.text
            missing = each.metric not in metrics and (of_evaluation is not None or not is_held_out)
            if missing and each.text not in self._warned:  # the policy's come later while only the critic learns
                self._warned.add(each.text)
                logger.warning("--stop_when %s: no such metric yet among %s", each.text, ", ".join(sorted(metrics)))
        return None

    def still_stops(self, text: str | None) -> bool:
        """Whether ``text``, which ended an earlier session, is still given."""
        return text in [each.text for each in self.conditions]


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


def notify(callbacks: Sequence[Callback], hook: str, *arguments: Any) -> None:
    """Call the method ``hook`` of each callback."""
    for callback in callbacks:
        getattr(callback, hook)(*arguments)


def restore_callbacks(callbacks: Sequence[Callback], saved: Sequence[dict[str, Any]]) -> bool:
    """Give each callback the state of the next one of its class in ``saved``; whether they are the same as then."""
    left = list(saved)
    for callback in callbacks:
        found = next((each for each in left if each["class"] == type(callback).__name__), None)
        if found is not None:
            left.remove(found)
            callback.load_state_dict(found["state"])
    were, are = [each["class"] for each in saved], [type(callback).__name__ for callback in callbacks]
    if were != are:
        logger.warning(
            "callbacks were %s and are %s: those of one class resume in their order, others start anew",
            ", ".join(were) or "none",
            ", ".join(are) or "none",
        )
    return were == are


def end_early(trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
    """Where trajectories have ended before the planned steps, evaluate, log and save as after the last of those.

    ``metrics`` are of the last step, empty without one in this session. All ranks call this together.
    """
    parts, run, step = trainer.components, trainer.config.run, trainer.global_step
    planned = min(trainer.planned_steps, trainer.config.ppo.max_steps or trainer.planned_steps)
    if parts.strategy.any_rank(trainer.should_stop) or step >= planned:
        return
    if parts.strategy.is_main:
        logger.info("all trajectories are used up in %d global steps of the %d that were planned", step, planned)
    if step == trainer.total_steps:  # known before the last report
        return
    if not any(name.startswith("eval") for name in metrics):
        unlogged = dict(metrics) if step % run.logging_steps else {}
        if logged := unlogged | trainer.evaluate():
            parts.trackers.log(step, logged)
        if parts.checkpointer is not None:
            parts.checkpointer.save_if_best(step, logged, parts.write_policy)
    if parts.checkpointer is not None and parts.checkpointer.due(step, True):
        trainer.save_checkpoint()
