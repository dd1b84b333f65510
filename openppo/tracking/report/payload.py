"""Logs of runs -> data of the page, within a bound on its size."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from openppo.tracking.report.catalog import charts_of
from openppo.tracking.report.health import Health
from openppo.tracking.report.rules import RULES
from openppo.tracking.report.run_data import LogLine, Row, RunData, short_names

MAX_POINTS = 2000
"""Points of a curve, over all runs of a page."""
MAX_NUMBERS = 180_000
"""Of all curves together; one takes 8 bytes or so."""
MAX_BYTES = 4_800_000
"""Of the data as JSON; scripts and styles come on top."""


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything that the page shows, with as many samples as curves and options leave room for."""
    names = {name for run in runs for row in run.metrics for name in row}
    most_points = max(10, min(MAX_POINTS, MAX_NUMBERS // max(1, len(names))) // len(runs))
    labels = short_names([run.folder for run in runs])
    made = [_run(label, run, most_points) for label, run in zip(labels, runs, strict=True)]
    content = {"charts": charts_of(names), "runs": made}
    room = max(0, MAX_BYTES - len(as_json(content))) // len(runs)
    for described, run in zip(made, runs, strict=True):
        samples = sample_rows(run.samples, run.tokens, room)
        described["samples"], described["sample_steps"], described["all_sample_steps"] = samples
    return content


def _run(label: str, run: RunData, most_points: int) -> dict[str, Any]:
    health = Health(run.config, RULES)
    for row in run.metrics:
        health.look(row["step"], row)
    return {
        "name": label,
        "folder": str(run.folder),
        "curves": curves(run.metrics, most_points, evaluation=False),
        "evaluations": curves(run.metrics, most_points, evaluation=True),
        "last_step": max((row["step"] for row in run.metrics), default=0),
        "findings": [vars(finding) for finding in health.findings],
        "config": run.config,
        "environment": run.environment,
        "unreadable": run.unreadable,
    }


def curves(rows: Sequence[Row], most_points: int, evaluation: bool) -> dict[str, Any]:
    """Metrics by name as equally long lists, of evaluations or of all else, over steps and hours of the run.

    With more rows than ``most_points`` a point is the mean of ``every`` rows, of a ``_max`` their maximum.
    """
    begin = _number(rows[0].get("time")) if rows else None
    names = dict.fromkeys(n for row in rows for n in row if n.startswith("eval") == evaluation)
    kept = [row for row in rows if any(n in row for n in names if n not in ("step", "time"))]
    every = max(1, -(-len(kept) // most_points))
    buckets = [kept[i : i + every] for i in range(0, len(kept), every)]
    return {
        "every": every,
        "steps": [bucket[-1]["step"] for bucket in buckets],
        "hours": [_hours(bucket[-1].get("time"), begin) for bucket in buckets],
        "values": {n: [_point(n, bucket) for bucket in buckets] for n in names if n not in ("step", "time")},
    }


def sample_rows(samples: Sequence[LogLine], tokens: Sequence[LogLine], most_bytes: int) -> tuple[list[Row], int, int]:
    """Samples with their ``tokens``, their number of steps, and the number of steps with any samples.

    Where tokens were logged, only steps with tokens count. Of too many bytes, evenly spread steps are taken;
    evaluations, which show the same prompts each time, may fill half of the room first.
    """
    described = {(line.step, line.evaluation) for line in tokens}
    sizes: dict[tuple[int, bool], int] = {}
    for line in [*samples, *tokens]:
        key = line.step, line.evaluation
        if key in described or not described:
            sizes[key] = sizes.get(key, 0) + json_size(line.text)
    chosen: set[tuple[int, bool]] = set()
    room = most_bytes
    for evaluation, share in ((True, most_bytes // 2), (False, room)):
        share = min(share, room)
        for key in evenly(sorted(key for key in sizes if key[1] == evaluation)):
            if sizes[key] <= share:
                chosen.add(key)
                share -= sizes[key]
                room -= sizes[key]
    rows = [line.parsed() for line in samples if (line.step, line.evaluation) in chosen]
    by_key: dict[tuple[Any, ...], Row] = {}
    for line in tokens:
        if (line.step, line.evaluation) in chosen:
            row = line.parsed()
            by_key[line.step, line.evaluation, row["sample"]] = row
    for row in rows:
        found = by_key.get((row["step"], bool(row.get("evaluation")), row.get("sample")))
        if found is not None:
            row["tokens"] = {k: v for k, v in found.items() if k not in ("step", "time", "evaluation", "sample")}
        row.pop("time", None)
    return rows, len({step for step, _ in chosen}), len({line.step for line in samples})


def evenly(keys: Sequence[Any]) -> list[Any]:
    """All ``keys``, ordered so that every beginning is spread evenly: last, first, middle, quarters, ..."""
    last = len(keys) - 1
    places = dict.fromkeys([last, 0][: len(keys)])  # an ordered set
    parts = 2
    while len(places) < len(keys):
        places |= dict.fromkeys(round(i * last / parts) for i in range(1, parts, 2))
        parts *= 2
    return [keys[place] for place in places]


def as_json(content: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element: ASCII without <, > and &."""
    try:
        text = json.dumps(content, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:  # an option may be infinite, and logs of others may have NaN
        text = json.dumps(_finite(content), separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def json_size(text: str) -> int:
    """Bytes of a line of JSON as ``as_json`` writes it, including spaces between its parts."""
    ascii = len(text.encode("ascii", "ignore"))
    others = len(text.encode("utf-16-le", "surrogatepass")) // 2 - ascii  # each is written as \\u and four digits
    return ascii + 6 * others + 5 * sum(map(text.count, "<>&"))


def _point(name: str, bucket: Sequence[Row]) -> float | None:
    values = [number for row in bucket if (number := _number(row.get(name))) is not None]
    if not values:
        return None
    value = max(values) if name.endswith("_max") else fmean(values)
    return float(f"{value:.5g}")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _finite(value: Any) -> Any:
    """``value`` with text for each number that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _hours(time: Any, begin: float | None) -> float | None:
    number = _number(time)
    return None if number is None or begin is None else round((number - begin) / 3600, 5)
