"""What the rules say while a run goes on: each finding once, with its beginning and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openppo.tracking.report.history import History
from openppo.tracking.report.rules import RULES

QUIET = 10
"""Reports of its metric without a finding after which it has gone; if it comes back later, it is a new one."""


@dataclass
class Finding:
    """What a rule has found: in words, with the remedy."""

    rule: str
    text: str
    """With the numbers of ``last``."""
    since: int
    """Step from which on it shows."""
    last: int
    """Step at which it was found last."""
    metrics: tuple[str, ...]
    """That it is about."""
    ended: bool = False


class Health:
    """Looks at the metrics of each report in turn. ``config`` are the options of the run by flag name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.history = History(config)
        self.findings: list[Finding] = []
        """In the order in which they began."""
        self._on: dict[str, Finding] = {}  # by rule
        self._quiet: dict[str, int] = {}  # reports since the rule found something

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Take in one report; the findings that begin with it. Rules whose metric it does not have look away."""
        self.history.add(step, metrics)
        begun = []
        for rule in RULES:
            if rule.metrics[0] not in metrics:
                continue
            found, finding = rule.check(self.history), self._on.get(rule.name)
            self._quiet[rule.name] = 0 if found is not None else self._quiet.get(rule.name, 0) + 1
            if found is not None and finding is not None:
                finding.text, finding.last = found.text.replace("{since}", str(finding.since)), step
            elif found is not None:
                text = found.text.replace("{since}", str(found.since))
                finding = self._on[rule.name] = Finding(rule.name, text, found.since, step, rule.metrics)
                self.findings.append(finding)
                begun.append(finding)
            elif finding is not None and self._quiet[rule.name] >= QUIET:
                self._on.pop(rule.name).ended = True
        return begun
