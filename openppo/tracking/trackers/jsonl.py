"""Metrics and samples as JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openppo.tracking.histogram import Histogram


class JSONLTracker:
    """Appends to ``metrics.jsonl``, ``samples.jsonl`` and ``tokens.jsonl``; numbers not finite become null."""

    name = "logs/*.jsonl"
    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._append("metrics.jsonl", [])  # fails now rather than at the first step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line: step, Unix time, metrics."""
        self._append("metrics.jsonl", [_json_line(step, metrics)])

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Append one line for each sample."""
        self._append("samples.jsonl", [_json_line(step, sample) for sample in samples])

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append one line for each sample that is described token by token."""
        self._append("tokens.jsonl", [_json_line(step, row) for row in rows])

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Histograms are for dashboards."""

    def close(self) -> None:
        """Nothing to close: no file stays open between lines."""

    def _append(self, name: str, lines: list[str]) -> None:
        with open(self._folder / name, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)


def json_form(value: Any) -> Any:
    """``value`` as it is after it was written as JSON here and read again: what JSON does not know has become text."""
    return json.loads(json.dumps(_finite(value), allow_nan=False, default=str))


def _json_line(step: int, content: Mapping[str, Any]) -> str:
    clash = content.keys() & {"step", "time"}
    assert not clash, f"{clash} are names of the line itself"
    line = {"step": step, "time": time.time(), **content}
    return json.dumps(_finite(line), ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    """``value`` with null in place of each number that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
