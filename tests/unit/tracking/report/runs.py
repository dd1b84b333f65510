"""Folders of runs, written line by line as a run writes them."""

import json

import yaml


def write_run(
    folder, metrics=({"step": 1, "time": 0.0, "reward": 1.0},), samples=(), tokens=(), config=None
):
    """``folder`` with the logs of a run of these rows and options."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    for file, rows in (("metrics", metrics), ("samples", samples), ("tokens", tokens)):
        (logs / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (logs / "config.yaml").write_text(yaml.safe_dump(config or {}))
    return folder
