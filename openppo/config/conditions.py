"""Conditions on metrics, such as ``kl > 0.2``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([^<>=]*[^<>=\s])\s*(>=|<=|>|<)\s*([^<>=\s]+)\s*")


@dataclass(frozen=True)
class Condition:
    """A metric compared with a number."""

    text: str
    """As it was given."""
    metric: str
    """Its name in the log."""
    comparison: str
    """One of > >= < <=."""
    bound: float
    """A finite number."""

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether the condition is true of ``metrics``; never for NaN."""
        return self.metric in metrics and _COMPARE[self.comparison](metrics[self.metric], self.bound)


def parse_condition(text: str, flag: str) -> Condition:
    """The condition that ``text`` states; ``ValueError`` naming ``flag`` if it states none."""
    match = _FORM.fullmatch(text)
    try:
        bound = float(match[3]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        raise ValueError(f"{flag} {text!r}: write a metric, one of > >= < <=, and a number, as in 'kl > 0.2'.")
    return Condition(text, match[1], match[2], bound)
