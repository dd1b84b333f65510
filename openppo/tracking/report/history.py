"""The curves of a run up to now, as the rules see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

WINDOW = 20
"""Reports that a rule about a trend looks at: the later half against the earlier one."""
LEVEL = 10
"""Reports that a rule about a level looks at."""
FEW = 5
"""Reports that stand for the beginning of a run, or for now."""


class History:
    """Metrics of a run so far. ``config`` are its options by flag name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.series: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Take in a report; what is not finite is left out."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))

    def values(self, name: str) -> list[float]:
        """All values of a metric."""
        return self.series.get(name, ([], []))[1]

    def last(self, name: str, n: int) -> list[float]:
        """The last ``n`` values; empty while there are fewer."""
        values = self.values(name)
        return values[-n:] if len(values) >= n else []

    def mean(self, name: str, n: int) -> float:
        """Mean of the last ``n`` values; NaN, which no comparison holds for, while there are fewer."""
        values = self.last(name, n)
        return fmean(values) if values else math.nan

    def start(self, name: str) -> float:
        """Mean of the first values; NaN until as many more have followed."""
        values = self.values(name)
        return fmean(values[:FEW]) if len(values) >= 2 * FEW else math.nan

    def step(self, name: str, back: int) -> int:
        """Step of the ``back``-th last value."""
        steps = self.series[name][0]
        return steps[max(len(steps) - back, 0)]

    def first(self, name: str, back: int, passes: Callable[[float], bool]) -> int:
        """Step of the first of the last ``back`` values that ``passes``; where only their mean does, of the first."""
        found = zip(*(series[-back:] for series in self.series[name]), strict=True)
        return next((int(step) for step, value in found if passes(value)), self.step(name, back))

    def option(self, name: str, otherwise: Any = None) -> Any:
        """An option of the run; ``otherwise`` where logs of an older version do not have it."""
        value = self.config.get(name)
        return otherwise if value is None else value


def halves(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the earlier and the later half, and the standard error of their difference."""
    earlier, later = values[: len(values) // 2], values[len(values) // 2 :]
    means = fmean(earlier), fmean(later)
    squares = [sum((value - mean) ** 2 for value in half) for half, mean in zip((earlier, later), means, strict=True)]
    return *means, math.sqrt(squares[0] / len(earlier) ** 2 + squares[1] / len(later) ** 2)


def rises(values: Sequence[float]) -> bool:
    """Whether the later half lies above the earlier one by more than two standard errors."""
    earlier, later, error = halves(values)
    return later - earlier > max(2 * error, 1e-9)
