"""What the rules say while a run goes on: each finding once, with its beginning and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openppo.tracking.report.history import History
from openppo.tracking.report.rules import RULES

QUIET = 10
"""Reports without a finding after which it has gone; if it comes back later, it is a new one."""


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
        self._on: dict[str, tuple[Finding, int]] = {}  # by rule, with the report at which it was found last
        self._n_reports = 0

    def look(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """Take in one report; the findings that begin with it."""
        self.history.add(step, metrics)
        self._n_reports += 1
        begun = []
        for rule in RULES:
            found = rule.check(self.history) if rule.metrics[0] in metrics else None
            before = self._on.get(rule.name)
            if found is not None and before is not None:
                finding = before[0]
                finding.text, finding.last = found.text.replace("{since}", str(finding.since)), step
            elif found is not None:
                text = found.text.replace("{since}", str(found.since))
                finding = Finding(rule.name, text, found.since, step, rule.metrics)
                self.findings.append(finding)
                begun.append(finding)
            else:
                if before is not None and self._n_reports - before[1] >= QUIET:
                    self._on.pop(rule.name)[0].ended = True
                continue
            self._on[rule.name] = finding, self._n_reports
        return begun
