"""What a run leaves in its folder beside the model."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import yaml

logger = logging.getLogger("openppo")


def save_config(folder: Path, options: Mapping[str, object]) -> None:
    """Write ``options`` to ``<folder>/config.yaml`` in their order; ``--config`` reads the file back."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(_plain(options), sort_keys=False, allow_unicode=True, default_flow_style=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _plain(value: object) -> object:
    """``value`` in the types that YAML knows: tuples become lists, paths and enums their text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def set_aside_logs(folder: Path) -> None:
    """Rename the logs of an earlier run to ``<folder>.1``, ``.2``, ...: two runs never share a file."""
    if not folder.is_dir():
        return
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    aside = folder.with_name(f"{folder.name}.{number}")
    folder.rename(aside)
    logger.info("logs of an earlier run are kept in %s", aside)


def cut_logs(folder: Path, step: int) -> None:
    """Remove the lines after ``step`` from every JSON Lines file: a run that goes on from there writes them again.

    A line that a killed process left unfinished goes too. One that says no step, as in a file of somebody else's, stays
    and is warned about.
    """
    for file in sorted(folder.glob("*.jsonl")):
        *lines, last = file.read_bytes().split(b"\n")  # only there: a logged text may hold U+2028 as it is
        steps = [_step_of(line) for line in lines]
        unknown = [number for number, found in enumerate(steps, start=1) if found is None and lines[number - 1].strip()]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            logger.warning("%s, line %d%s: no JSON with a number as 'step'; kept as it is", file, unknown[0], more)
        kept = [line for line, found in zip(lines, steps, strict=True) if found is None or found <= step]
        if last and (found := _step_of(last)) is not None and found <= step:
            kept.append(last)  # whole but for its end
        new = file.with_name(f".{file.name}.new")
        new.write_bytes(b"".join(line + b"\n" for line in kept))
        new.replace(file)


def _step_of(line: bytes) -> float | None:
    """What a line of a log gives as its step, if it does."""
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None
