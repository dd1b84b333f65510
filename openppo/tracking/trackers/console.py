"""One line per step, and a sample now and then, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from openppo.tracking.histogram import Histogram
from openppo.tracking.terminal import harmless, rendered, write_line

STEP_TIME = "time/step_s"
_LONGEST_PROMPT = 300
_LONGEST_RESPONSE = 600


class ConsoleTracker:
    """Prints one line per step with the metrics named in ``headline``; none of them, no line.

    Every ``samples_every`` steps (0: never) it prints the first sample of the step, shortened, on lines of its own.
    """

    name = "the console"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, headline: Sequence[str], total_steps: int, samples_every: int = 0) -> None:
        self._headline = tuple(headline)
        self._total_steps = total_steps
        self._samples_every = samples_every
        self._widths: dict[str, int] = {}  # of numbers so far, so that lines stand in columns

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line."""
        parts = [self._part(name, metrics[name]) for name in self._headline if name in metrics]
        if parts:
            count = f"{step:{len(str(self._total_steps))}}/{self._total_steps}"
            write_line(" | ".join([f"step {count}", *parts]), sys.stdout)

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Print the first of them if the step is due."""
        if samples and self._samples_every > 0 and step % self._samples_every == 0:
            for line in rendered(_sample(step, samples[0]), sys.stdout):
                write_line(line, sys.stdout)

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Tokens are for the report."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Histograms are for dashboards."""

    def close(self) -> None:
        """Nothing to close."""

    def _part(self, name: str, value: float) -> str:
        if name == STEP_TIME:
            return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"
        number = f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"
        self._widths[name] = max(self._widths.get(name, 0), len(number))
        return f"{name} {number:>{self._widths[name]}}"


def _sample(step: int, sample: Mapping[str, Any]) -> Table:
    """Prompt (its end), response (its start), and what is known of it beside."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    facts = [f"of step {step}" + (", evaluation" if sample.get("evaluation") else "")]
    if "reward" in sample:
        facts.append(f"reward {sample['reward']:.4g}")
    if "finish_reason" in sample:
        facts.append(f"ended by {sample['finish_reason']}")
    if sample.get("label") is not None:
        facts.append(f"label {harmless(str(sample['label']), 40)}")
    table.add_row("  sample", Text(", ".join(facts)))
    table.add_row("  prompt", Text(harmless(sample.get("prompt", ""), _LONGEST_PROMPT, keep="end"), style="dim"))
    table.add_row("  response", Text(harmless(sample.get("response", ""), _LONGEST_RESPONSE)))
    return table
