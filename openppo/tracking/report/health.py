"""The curves of a run so far, and the findings of the rules of health in them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from openppo.config.rewards import NONE

WINDOW = 20
"""Reports of a trend: the later half against the earlier one."""
LEVEL = 10
"""Reports of a level."""
FEW = 5
"""Reports that stand for the beginning of a run, or for its present."""
QUIET = 10
"""Reports of a metric without a finding after which the last one has ended; a later one is new."""

SUPPOSE_A_REWARD = ("kl_far", "entropy_grows", "many_truncated")
"""Rules that are silent in a run without any reward, though they look at no reward."""


class History:
    """Metrics of a run so far. ``config`` are its options by flag name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.series: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a report, without values that are not finite."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                steps, values = self.series.setdefault(name, ([], []))
                steps.append(step)
                values.append(float(value))

    def steps(self, name: str) -> list[int]:
        """Return the steps of all values of a metric."""
        return self.series.get(name, ([], []))[0]

    def values(self, name: str) -> list[float]:
        """Return all values of a metric."""
        return self.series.get(name, ([], []))[1]

    def last(self, name: str, n: int) -> list[float]:
        """Return the last ``n`` values; empty while there are fewer."""
        values = self.values(name)
        return values[-n:] if len(values) >= n else []

    def mean(self, name: str, n: int) -> float:
        """Mean of the last ``n`` values; NaN, for which no comparison holds, while there are fewer."""
        values = self.last(name, n)
        return fmean(values) if values else math.nan

    def start(self, name: str) -> float:
        """Mean of the first values; NaN until as many more have followed."""
        values = self.values(name)
        return fmean(values[:FEW]) if len(values) >= 2 * FEW else math.nan

    def option(self, name: str, otherwise: Any = None) -> Any:
        """Return an option of the run; ``otherwise`` where logs of an older version lack it."""
        value = self.config.get(name)
        return otherwise if value is None else value

    @property
    def distils(self) -> bool:
        """True for a run without any reward, whose KL is to fall."""
        return self.option("reward_fn") == NONE

    def flat_reward(self) -> bool:
        """True if a window of rewards does not rise: its halves differ by no more than two standard errors."""
        rewards = self.last("reward", WINDOW)
        if not rewards:
            return False

        earlier, later, error = halves(rewards)
        return later - earlier <= max(2 * error, 1e-9)


def halves(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the means of the earlier and the later half, and the standard error of their difference."""
    middle = len(values) // 2
    earlier = values[:middle]
    later = values[middle:]
    squared_error = _squared_error_of_mean(earlier) + _squared_error_of_mean(later)
    return fmean(earlier), fmean(later), math.sqrt(squared_error)


def _squared_error_of_mean(values: Sequence[float]) -> float:
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values) / len(values) ** 2


@dataclass(frozen=True)
class Rule:
    """A rule of health: ``warn`` sees the mean of the ``last`` values of the first of ``metrics``.

    It is called at each report whose mean ``passes``, and returns a text, with ``{since}`` for the step of the first of
    these values, or None.
    """

    name: str
    metrics: tuple[str, ...]
    about: str
    last: int
    passes: Callable[[float, History], bool]
    warn: Callable[[History, float], str | None]


@dataclass
class Finding:
    """A rule's warning with its remedy, from step ``since`` to ``last``; ``text`` shows the numbers at ``last``."""

    rule: str
    text: str
    since: int
    last: int
    metrics: tuple[str, ...]
    ended: bool = False
    quiet: int = 0
    """Reports since the rule found something."""

    def renew(self, step: int, text: str) -> None:
        """Extend the finding to ``step``, where the rule found it again, with the text of that step."""
        self.text = text
        self.last = step
        self.quiet = 0

    def count_quiet(self) -> None:
        """Count a report in which the rule found nothing; the finding ends after ``QUIET`` of them."""
        self.quiet += 1
        self.ended = self.quiet >= QUIET


class Health:
    """Applies ``rules`` to each report in turn. ``config`` are the options of the run by flag name."""

    def __init__(self, config: Mapping[str, Any], rules: Sequence[Rule]) -> None:
        self.history = History(config)
        self.rules = rules
        self.findings: list[Finding] = []
        """All findings in the order in which they began."""

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Add one report, and return the findings that begin with it."""
        self.history.add(step, metrics)

        begun = []
        for rule in self.rules:
            metric = rule.metrics[0]
            is_silent = self.history.distils and rule.name in SUPPOSE_A_REWARD
            if metric not in metrics or is_silent:
                continue

            mean = self.history.mean(metric, rule.last)
            text = rule.warn(self.history, mean) if rule.passes(mean, self.history) else None
            finding = self._current(rule)
            if text is not None:
                first = self.history.steps(metric)[-rule.last :][0]
                since = first if finding is None else finding.since
                text = text.replace("{since}", str(since))
                if finding is None:
                    begun.append(Finding(rule.name, text, since, last=step, metrics=rule.metrics))
                else:
                    finding.renew(step, text)
            elif finding is not None:
                finding.count_quiet()
        self.findings += begun
        return begun

    def _current(self, rule: Rule) -> Finding | None:
        """The finding of a rule that has not ended."""
        for finding in self.findings:
            if finding.rule == rule.name and not finding.ended:
                return finding
        return None
