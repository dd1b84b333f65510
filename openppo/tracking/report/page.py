"""One HTML file about one or several runs: no network, no server, nothing to build, below 5 MB."""

import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from openppo import __version__
from openppo.tracking.output_files import replacing
from openppo.tracking.report.catalog import charts_of
from openppo.tracking.report.health import Health
from openppo.tracking.report.rules import RULES
from openppo.tracking.report.run_data import LogLine, Row, RunData, read_run, short_names

MAX_POINTS = 2000
"""Points of a curve, over all runs of a page."""
MAX_NUMBERS = 180_000
"""Of all curves together; one takes 8 bytes or so."""
MAX_BYTES = 4_800_000
"""Of the data as JSON; scripts and styles come on top."""
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
    """Test for the beginning of a page that ``write_report`` has written."""
    return b"<title>OpenPPO report</title>" in beginning


def render(runs: Sequence[RunData], running: bool = False) -> str:
    """The page. Sampled text enters it as JSON only, and its scripts insert it as text.

    The policy in its head allows exactly our script and style, so nothing else runs even if some text got through.
    """
    page, style = (
        (_PARTS / name).read_text(encoding="utf-8") for name in ("page.html", "style.css")
    )
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    hashes = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    )
    policy = "default-src 'none'; img-src data:; script-src 'sha256-{}'; style-src 'sha256-{}'; base-uri 'none'".format(
        *hashes
    )
    about = {"version": __version__, "written": int(time.time()), "running": running}
    data = as_json(about | payload(runs))
    for place, text in {"POLICY": policy, "STYLE": style, "SCRIPT": script, "DATA": data}.items():
        page = page.replace(
            f"<!--{place}-->", text, 1
        )  # the data last: nothing is replaced inside it
    return page


def payload(runs: Sequence[RunData]) -> dict[str, Any]:
    """Everything that the page shows, with as many samples as curves and options leave room for."""
    names = {name for run in runs for row in run.metrics for name in row}
    most_points = max(10, min(MAX_POINTS, MAX_NUMBERS // max(1, len(names))) // len(runs))
    folders = [str(run.folder.resolve()) for run in runs]
    labels, made = short_names(folders), []
    for folder, run in zip(folders, runs, strict=True):
        health = Health(run.config, RULES)
        for row in run.metrics:
            health.look(row["step"], row)
        made.append(
            {
                "name": labels[folder],
                "folder": str(run.folder),
                "curves": curves(run.metrics, most_points, evaluation=False),
                "evaluations": curves(run.metrics, most_points, evaluation=True),
                "last_step": max((row["step"] for row in run.metrics), default=0),
                "findings": [vars(finding) for finding in health.findings],
                "config": run.config,
                "environment": run.environment,
                "unreadable": run.unreadable,
            }
        )
    content = {"charts": charts_of(names), "runs": made}
    room = max(0, MAX_BYTES - len(as_json(content))) // len(runs)
    for described, run in zip(made, runs, strict=True):
        samples = sample_rows(run.samples, run.tokens, room)
        described["samples"], described["sample_steps"], described["all_sample_steps"] = samples
    return content


def curves(rows: Sequence[Row], most_points: int, evaluation: bool) -> dict[str, Any]:
    """Metrics by name as equally long lists, of evaluations or of all else, over steps and hours of the run.

    With more rows than ``most_points`` a point is the mean of ``every`` rows, of a ``_max`` or ``_min`` the extreme.
    """
    all_names = dict.fromkeys(name for row in rows for name in row)
    names = [
        name
        for name in all_names
        if name not in ("step", "time") and name.startswith("eval") == evaluation
    ]
    kept = [row for row in rows if not row.keys().isdisjoint(names)]
    every = max(1, -(-len(kept) // most_points))
    buckets = [kept[i : i + every] for i in range(0, len(kept), every)]
    begin, times = (
        rows[0].get("time") if rows else None,
        [bucket[-1].get("time") for bucket in buckets],
    )
    return {
        "every": every,
        "steps": [bucket[-1]["step"] for bucket in buckets],
        "hours": [
            None if time is None or begin is None else round((time - begin) / 3600, 5)
            for time in times
        ],
        "values": {name: [_point(name, bucket) for bucket in buckets] for name in names},
    }


def _point(name: str, bucket: Sequence[Row]) -> float | None:
    values = [value for row in bucket if isinstance(value := row.get(name), int | float)]
    if not values:
        return None
    of = {"max": max, "min": min}.get(name.rpartition("_")[2], fmean)
    return float(f"{of(values):.5g}")


def sample_rows(
    samples: Sequence[LogLine], tokens: Sequence[LogLine], most_bytes: int
) -> tuple[list[Row], int, int]:
    """Samples with their ``tokens``, their number of steps, and the number of steps with any samples.

    Where tokens were logged, only steps with tokens count. Of too many bytes, every n-th step is taken, the last one
    included; evaluations, which show the same prompts each time, may fill half of the room first.
    """
    described = {line.key for line in tokens}
    sizes: Counter[tuple[int, bool]] = Counter()
    for line in [*samples, *tokens]:
        if line.key in described or not described:
            sizes[line.key] += len(as_json(line.text))
    chosen: set[tuple[int, bool]] = set()
    for evaluation, share in ((True, 2), (False, 1)):
        keys = sorted(key for key in sizes if key[1] == evaluation)
        room = (most_bytes - sum(sizes[key] for key in chosen)) // share
        thinned = (keys[::-every] for every in range(1, len(keys) + 1))
        chosen.update(
            next((some for some in thinned if sum(map(sizes.__getitem__, some)) <= room), [])
        )
    parsed = [(line.key, json.loads(line.text)) for line in tokens if line.key in chosen]
    by_sample = {(key, row.pop("sample")): row for key, row in parsed}
    rows = []
    for line in samples:
        if line.key in chosen:
            row = json.loads(line.text)
            row.pop("time", None)
            if (found := by_sample.get((line.key, row.get("sample")))) is not None:
                row["tokens"] = {
                    k: v for k, v in found.items() if k not in ("step", "time", "evaluation")
                }
            rows.append(row)
    return rows, len({step for step, _ in chosen}), len({line.key[0] for line in samples})


def as_json(content: object) -> str:
    """JSON that is safe inside a script element: ASCII without <, > and &, and without NaN, which becomes text."""
    text = json.dumps(content, separators=(",", ":"), default=str)
    if (
        "NaN" in text or "Infinity" in text
    ):  # an option may be infinite, and logs of others may have NaN
        text = json.dumps(json.loads(text, parse_constant=str), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
