"""The end of a run by its metrics: ``--stop_when``."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence

from openppo.config import Condition
from openppo.tracking.report.catalog import GROUPS, matches

logger = logging.getLogger("openppo")

_KNOWN = [name for charts in GROUPS.values() for chart in charts for name in chart.metrics]


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
