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
    """Remove the lines after ``step`` from every JSON Lines file: a run that goes on from there writes them again."""
    for file in folder.glob("*.jsonl"):
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        new = file.with_name(f".{file.name}.new")
        new.write_text("".join(kept), encoding="utf-8", errors="surrogateescape")
        new.replace(file)
