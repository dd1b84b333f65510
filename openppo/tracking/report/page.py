"""One HTML file about one or several runs: no network, no server, nothing to build, below 5 MB."""

import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from openppo import __version__
from openppo.tracking.output_files import replacing
from openppo.tracking.report.catalog import charts_of
from openppo.tracking.report.health import Health
from openppo.tracking.report.rules import RULES
from openppo.tracking.report.run_data import (
    LogLine,
    Row,
    RunData,
    StepKey,
    read_run,
    short_names,
)

MAX_POINTS = 2000
"""Points of a curve, over all runs of a page."""
MAX_NUMBERS = 180_000
"""Numbers of all curves together; one takes 8 bytes or so."""
MAX_BYTES = 4_800_000
"""Size of the data as JSON; scripts and styles come on top."""
_PARTS = Path(__file__).with_name("page")
_SCRIPTS = ("dom.js", "charts.js", "tokens.js", "conversations.js", "samples.js", "main.js")


def write_report(folders: Sequence[str | Path], output: Path, running: bool = False) -> Path:
    """Write the page about the runs in ``folders`` to ``output``, whole or not at all.

    ``running``: the run is not over and the page will be written again. Raises ``ValueError`` naming a folder without a
    run, ``OSError`` if ``output`` cannot be written.
    """
    page = render([read_run(folder) for folder in folders], running)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as new:
        new.write_text(page, encoding="utf-8")
    return output


def is_report(beginning: bytes) -> bool:
    """True for the beginning of a page that ``write_report`` has written."""
    return b"<title>OpenPPO report</title>" in beginning


def render(runs: Sequence[RunData], running: bool = False) -> str:
    """Write the page. Sampled text enters it as JSON only, and its scripts insert it as text.

    The policy in its head allows exactly our script and style, so nothing else runs even if some text got through.
    """
    page = _part("page.html")
    style = _part("style.css")
    scripts = "\n".join(map(_part, _SCRIPTS))
    script = f'"use strict";\n(() => {{\n{scripts}\n}})();\n'
    policy = (
        f"default-src 'none'; img-src data:; script-src 'sha256-{_sha256(script)}'; "
        f"style-src 'sha256-{_sha256(style)}'; base-uri 'none'"
    )
    about = {"version": __version__, "written": int(time.time()), "running": running}
    data = as_json(about | payload(runs))

    # The data comes last, so that nothing is replaced inside it.
    for place, text in {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}.items():
        page = page.replace(f"<!--{place}-->", text, 1)
    return page


def _part(name: str) -> str:
    """The text of a file that the page consists of."""
    return (_PARTS / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    """The hash by which a policy allows a script or style, in base64."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Collect everything that the page shows, with as many samples as curves and options leave room for."""
    names = {name for run in runs for row in run.metrics for name in row}
    points_by_numbers = MAX_NUMBERS // max(1, len(names))
    most_points = max(10, min(MAX_POINTS, points_by_numbers) // len(runs))

    folders = [str(run.folder.resolve()) for run in runs]
    labels = short_names(folders)
    descriptions = []
    for folder, run in zip(folders, runs, strict=True):
        descriptions.append(described(run, labels[folder], most_points))
    content = {"charts": charts_of(names), "runs": descriptions}

    room = max(0, MAX_BYTES - len(as_json(content))) // len(runs)
    for description, run in zip(descriptions, runs, strict=True):
        rows, n_steps, n_all_steps = sample_rows(run.samples, run.tokens, room)
        description["samples"] = rows
        description["sample_steps"] = n_steps
        description["all_sample_steps"] = n_all_steps
    return content


def described(run: RunData, name: str, most_points: int) -> dict[str, Any]:
    """Describe a run without its samples: curves, findings, options."""
    health = Health(run.config, RULES)
    for row in run.metrics:
        health.look(row["step"], row)

    return {
        "name": name,
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
    """Return metrics as equally long lists over steps and hours of the run: those of evaluations, or all others.

    With more rows than ``most_points`` a point is the mean of ``every`` rows; for a ``_max`` or ``_min``, the extreme.
    """
    names = []
    for name in dict.fromkeys(name for row in rows for name in row):
        if name not in ("step", "time") and name.startswith("eval") == evaluation:
            names.append(name)

    kept = [row for row in rows if not row.keys().isdisjoint(names)]
    every = max(1, -(-len(kept) // most_points))
    buckets = [kept[i : i + every] for i in range(0, len(kept), every)]
    begin = rows[0].get("time") if rows else None
    return {
        "every": every,
        "steps": [bucket[-1]["step"] for bucket in buckets],
        "hours": [_hours(begin, bucket[-1].get("time")) for bucket in buckets],
        "values": {name: _points(name, buckets) for name in names},
    }


def _hours(begin: float | None, end: float | None) -> float | None:
    if begin is None or end is None:
        return None
    return round((end - begin) / 3600, 5)


def _points(name: str, buckets: Sequence[Sequence[Row]]) -> list[float | None]:
    """Points of a curve, one for each bucket of rows; None where no row has a number."""
    reduce = {"max": max, "min": min}.get(name.rpartition("_")[2], fmean)
    points: list[float | None] = []
    for bucket in buckets:
        values = [row.get(name) for row in bucket]
        numbers = [value for value in values if isinstance(value, int | float)]
        points.append(float(f"{reduce(numbers):.5g}") if numbers else None)
    return points


def sample_rows(
    samples: Sequence[LogLine], tokens: Sequence[LogLine], most_bytes: int
) -> tuple[list[Row], int, int]:
    """Return samples with their ``tokens``, their number of steps, and the number of steps with any samples.

    Where tokens were logged, only steps with tokens count.
    """
    with_tokens = {line.key for line in tokens}
    sizes: Counter[StepKey] = Counter()
    for line in [*samples, *tokens]:
        if line.key in with_tokens or not with_tokens:
            sizes[line.key] += len(as_json(line.text))
    chosen = chosen_steps(sizes, most_bytes)

    tokens_of: dict[tuple[StepKey, Any], Row] = {}
    for line in tokens:
        if line.key in chosen:
            row = json.loads(line.text)
            tokens_of[line.key, row.pop("sample")] = row

    rows = []
    for line in samples:
        if line.key in chosen:
            row = json.loads(line.text)
            row.pop("time", None)
            token_row = tokens_of.get((line.key, row.get("sample")))
            if token_row is not None:
                row["tokens"] = {
                    name: values
                    for name, values in token_row.items()
                    if name not in ("step", "time", "evaluation")
                }
            rows.append(row)

    chosen_numbers = {step for step, _ in chosen}
    all_numbers = {line.step for line in samples}
    return rows, len(chosen_numbers), len(all_numbers)


def chosen_steps(sizes: Mapping[StepKey, int], most_bytes: int) -> set[StepKey]:
    """Choose steps that fit ``most_bytes`` together: all, or every n-th with the last one.

    Evaluations, which show the same prompts each time, may fill half of the room first.
    """
    chosen: set[StepKey] = set()
    for evaluation in (True, False):
        keys = sorted(key for key in sizes if key[1] == evaluation)
        room = most_bytes - sum(sizes[key] for key in chosen)
        if evaluation:
            room //= 2
        for every in range(1, len(keys) + 1):
            thinned = keys[::-every]
            if sum(sizes[key] for key in thinned) <= room:
                chosen.update(thinned)
                break
    return chosen


def as_json(content: object) -> str:
    """Write JSON that is safe inside a script element: ASCII without <, > and &; NaN and infinity become text."""
    text = json.dumps(content, separators=(",", ":"), default=str)
    # An option may be infinite, and logs of others may hold NaN.
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=str), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
