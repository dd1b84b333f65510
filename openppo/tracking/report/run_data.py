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
ROLLOUTS = "{split}-rank{rank}-*.jsonl"
"""Files of ``--dump_rollouts``; their numbers rise with the step, and ``load_dataset`` knows the split by the name."""
_ROLLOUT = re.compile(r'\{"step": (\d+), "split": "(\w+)", "sample": (\d+), .*\}\n')
_OF_EPISODES = ("messages", "ending", "turns", "error", "output")
_ROLLOUTS_OF_A_STEP, _MOST_BYTES = (
    64,
    64 * 2**20,
)  # of the first rank are read; in all, else every n-th step
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
    (samples, bad_samples), (tokens, bad_tokens) = map(
        _log_lines, (logs / "samples.jsonl", logs / "tokens.jsonl")
    )
    (dumped, bad_dumped) = _rollouts(logs)
    config = _mapping(logs / "config.yaml")
    environment, n_bad = _mapping(logs / "environment.json"), bad_samples + bad_tokens + bad_dumped
    place, n_bad = logs.parent if logs.name == "logs" else logs, n_bad + len(lines) - len(metrics)
    return RunData(
        place,
        metrics,
        samples + dumped,
        tokens=tokens,
        config=config,
        environment=environment,
        unreadable=n_bad,
    )


def find_logs(folder: Path) -> Path:
    """The folder of logs in ``folder``, or ``folder`` itself; ``ValueError`` without metrics and rollouts."""
    for place in (folder / "logs", folder):
        if (place / "metrics.jsonl").is_file() or any(
            place.glob(ROLLOUTS.format(split="*", rank="*"))
        ):
            return place
    what = "name the --save_path of a run, its folder of logs, or one of --dump_rollouts"
    raise ValueError(f"{folder} has no logs/metrics.jsonl: {what}.")


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
    return [
        line for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if line
    ]


def _log_lines(file: Path) -> tuple[list[LogLine], int]:
    lines = _lines(file)
    whole = [(match, line) for line in lines if line[-1] == "}" and (match := _STEP.match(line))]
    kept = [
        LogLine((int(match[1]), '"evaluation": true' in line[:120]), line) for match, line in whole
    ]
    return kept, len(lines) - len(kept)


def _rollouts(folder: Path) -> tuple[list[LogLine], int]:
    """Dumped rollouts as lines of samples, thinned out as they are read; and how many lines cannot be read."""
    kept: list[LogLine] = []
    every = 1
    size = 0
    unreadable = 0
    for file in sorted(folder.glob(ROLLOUTS.format(split="*", rank="00000"))):
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if (match := _ROLLOUT.fullmatch(line)) is None:
                    unreadable += line.endswith("\n")  # the last one may be under way
                elif int(match[1]) % every == 0 and int(match[3]) < _ROLLOUTS_OF_A_STEP:
                    kept.append(LogLine((int(match[1]), match[2] == "eval"), line))
                    size += len(line)
                    while size > _MOST_BYTES and kept:
                        every *= 2
                        kept = [each for each in kept if each.key[0] % every == 0]
                        size = sum(len(each.text) for each in kept)
    return [LogLine(line.key, _as_sample(line)) for line in kept], unreadable


def _as_sample(line: LogLine) -> str:
    """A dumped rollout as ``samples.jsonl`` has it."""
    row = json.loads(line.text)
    row |= {"rewards": json.loads(row["rewards"]), "messages": json.loads(row["messages"])}
    if row["messages"] is None:
        row = {name: value for name, value in row.items() if name not in _OF_EPISODES}
    return json.dumps(row | ({"evaluation": True} if line.key[1] else {}))


def _mapping(file: Path) -> Row:
    """A mapping in YAML or JSON; empty where the file is missing or holds something else."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
