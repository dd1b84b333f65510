"""A run read from the logs in its folder."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

_STEP = re.compile(r'\{"step": (\d+)')  # every line of our logs begins so
Row = dict[str, Any]


class LogLine(NamedTuple):
    """A line of a log that has not been parsed yet; ``key`` is its step and whether it is of an evaluation."""

    key: tuple[int, bool]
    text: str


@dataclass(frozen=True)
class RunData:
    """A run from its logs; lines of ``samples`` and ``tokens``, which can be large, are not parsed yet.

    ``unreadable`` counts lines that are not JSON, except for the unfinished last line of a killed run.
    """

    folder: Path
    metrics: list[Row]
    samples: list[LogLine] = field(default_factory=list)
    tokens: list[LogLine] = field(default_factory=list)
    config: Row = field(default_factory=dict)
    environment: Row = field(default_factory=dict)
    unreadable: int = 0


def read_run(folder: str | Path) -> RunData:
    """Read a run by its folder or its folder of logs; a missing log is empty.

    Raises ``ValueError`` without metrics.
    """
    logs = find_logs(Path(folder))
    lines, metrics = _lines(logs / "metrics.jsonl"), []
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            metrics += [row] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    (samples, bad_samples), (tokens, bad_tokens) = map(_log_lines, (logs / "samples.jsonl", logs / "tokens.jsonl"))
    config, environment = _mapping(logs / "config.yaml"), _mapping(logs / "environment.json")
    n_bad = len(lines) - len(metrics) + bad_samples + bad_tokens
    return RunData(logs.parent if logs.name == "logs" else logs, metrics, samples, tokens, config, environment, n_bad)


def find_logs(folder: Path) -> Path:
    """The folder of logs in ``folder``, or ``folder`` itself; ``ValueError`` without metrics."""
    for place in (folder / "logs", folder):
        if (place / "metrics.jsonl").is_file():
            return place
    raise ValueError(f"{folder} has no logs/metrics.jsonl: name the --save_path of a run, or its folder of logs.")


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """The fewest last parts of each path that tell all of them apart: ``gsm8k/test.jsonl``."""
    parts = {path: PurePath(path).parts for path in paths}
    for n in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: str(PurePath(*part[-n:])) for path, part in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {path: path for path in parts}


def _lines(file: Path) -> list[str]:
    """Whole lines of ``file``; none where it is missing."""
    if not file.is_file():
        return []
    return [line for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if line]


def _log_lines(file: Path) -> tuple[list[LogLine], int]:
    lines = _lines(file)
    whole = [(match, line) for line in lines if line[-1] == "}" and (match := _STEP.match(line))]
    kept = [LogLine((int(match[1]), '"evaluation": true' in line[:120]), line) for match, line in whole]
    return kept, len(lines) - len(kept)


def _mapping(file: Path) -> Row:
    """A mapping in YAML or JSON; empty where the file is missing or holds something else."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
