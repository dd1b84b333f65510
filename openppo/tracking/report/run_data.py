"""A run read from the logs in its folder."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

_STEP = re.compile(r'\{"step": (\d+)')
"""Beginning of every line of our logs."""
ROLLOUTS = "{split}-rank{rank}-*.jsonl"
"""Files of ``--dump_rollouts``; their numbers rise with the step, and ``load_dataset`` knows the split by the name."""
_ROLLOUT = re.compile(r'\{"step": (\d+), "split": "(\w+)", "sample": (\d+), .*\}\n')
_OF_EPISODES = ("messages", "ending", "turns", "error", "output")
"""Entries of a dumped rollout that only an agent's episodes have."""
_ROLLOUTS_OF_A_STEP = 64
"""Dumped rollouts of a step that are read, from the first rank."""
_MOST_BYTES = 64 * 2**20
"""Dumped rollouts that are kept in memory; beyond, only those of every n-th step."""
Row = dict[str, Any]
StepKey = tuple[int, bool]
"""A step, and true for its evaluation."""


class LogLine(NamedTuple):
    """A line of a log, not parsed yet."""

    key: StepKey
    text: str

    @property
    def step(self) -> int:
        """The step of the line."""
        return self.key[0]


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
    metrics, bad_metrics = _metrics(logs / "metrics.jsonl")
    samples, bad_samples = _log_lines(logs / "samples.jsonl")
    tokens, bad_tokens = _log_lines(logs / "tokens.jsonl")
    dumped, bad_dumped = _rollouts(logs)
    return RunData(
        folder=logs.parent if logs.name == "logs" else logs,
        metrics=metrics,
        samples=samples + dumped,
        tokens=tokens,
        config=_mapping(logs / "config.yaml"),
        environment=_mapping(logs / "environment.json"),
        unreadable=bad_metrics + bad_samples + bad_tokens + bad_dumped,
    )


def find_logs(folder: Path) -> Path:
    """Return the folder of logs in ``folder``, or ``folder`` itself; ``ValueError`` without metrics and rollouts."""
    any_rollouts = ROLLOUTS.format(split="*", rank="*")
    for place in (folder / "logs", folder):
        if (place / "metrics.jsonl").is_file() or any(place.glob(any_rollouts)):
            return place
    remedy = "name the --save_path of a run, its folder of logs, or one of --dump_rollouts"
    raise ValueError(f"{folder} has no logs/metrics.jsonl: {remedy}.")


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Name each path by the fewest last parts that tell all of them apart: ``gsm8k/test.jsonl``."""
    distinct = list(dict.fromkeys(paths))
    most_parts = max((len(PurePath(path).parts) for path in distinct), default=0)
    for n in range(1, most_parts + 1):
        names = {path: _last_parts(path, n) for path in distinct}
        if len(set(names.values())) == len(names):
            return names
    return {path: path for path in distinct}


def _last_parts(path: str, n: int) -> str:
    tail = PurePath(path).parts[-n:]
    return str(PurePath(*tail))


def _lines(file: Path) -> list[str]:
    """Whole lines of ``file``, without empty ones; none if it is missing."""
    if not file.is_file():
        return []
    *lines, _ = file.read_text(encoding="utf-8", errors="replace").split("\n")
    return [line for line in lines if line]


def _metrics(file: Path) -> tuple[list[Row], int]:
    """Rows of metrics, and the number of lines that cannot be read."""
    lines = _lines(file)
    rows = []
    for line in lines:
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows, len(lines) - len(rows)


def _log_lines(file: Path) -> tuple[list[LogLine], int]:
    """Lines of samples or tokens, and the number of lines that cannot be read."""
    lines = _lines(file)
    kept = []
    for line in lines:
        match = _STEP.match(line)
        if match is not None and line.endswith("}"):
            is_evaluation = '"evaluation": true' in line[:120]
            kept.append(LogLine((int(match[1]), is_evaluation), line))
    return kept, len(lines) - len(kept)


def _rollouts(folder: Path) -> tuple[list[LogLine], int]:
    """Dumped rollouts as lines of samples, thinned out as they are read, and the number of unreadable lines."""
    kept: list[LogLine] = []
    size = 0
    every = 1  # steps from one that is kept to the next
    unreadable = 0
    for file in sorted(folder.glob(ROLLOUTS.format(split="*", rank="00000"))):
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                match = _ROLLOUT.fullmatch(line)
                if match is None:
                    unreadable += line.endswith("\n")  # the last one may be under way
                    continue

                step = int(match[1])
                sample = int(match[3])
                if step % every != 0 or sample >= _ROLLOUTS_OF_A_STEP:
                    continue

                kept.append(LogLine((step, match[2] == "eval"), line))
                size += len(line)
                while size > _MOST_BYTES and kept:
                    every *= 2
                    kept = [each for each in kept if each.step % every == 0]
                    size = sum(len(each.text) for each in kept)

    return [LogLine(line.key, _as_sample(line)) for line in kept], unreadable


def _as_sample(line: LogLine) -> str:
    """A dumped rollout in the form of ``samples.jsonl``."""
    row = json.loads(line.text)
    row["rewards"] = json.loads(row["rewards"])
    row["messages"] = json.loads(row["messages"])
    greedy = json.loads(row.pop("greedy", "null"))  # earlier versions dumped none
    if greedy is not None:
        row["greedy"] = greedy
    if row["messages"] is None:
        row = {name: value for name, value in row.items() if name not in _OF_EPISODES}

    _, is_evaluation = line.key
    if is_evaluation:
        row["evaluation"] = True
    return json.dumps(row)


def _mapping(file: Path) -> Row:
    """A mapping in YAML or JSON; empty where the file is missing or holds something else."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
