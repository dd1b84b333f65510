"""Recordings as files: JSON in rows that can be read in a diff."""

import json
from pathlib import Path
from typing import Any

from tests.golden.house.compare import Recording

RECORDED = Path(__file__).with_name("recorded")


def save(recording: Recording, folder: Path) -> None:
    """Write the recording of a case into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{recording.case}.json").write_text(in_rows(vars(recording)) + "\n")


def load(file: Path) -> Recording:
    """Read the recording of a case."""
    return Recording(**json.loads(file.read_text()))


def load_all(folder: Path) -> dict[str, Recording]:
    """Recordings in ``folder``, by case."""
    return {file.stem: load(file) for file in sorted(folder.glob("*.json"))}


def in_rows(value: Any, indent: str = "") -> str:
    """JSON in which a dictionary without others inside is one row, and so is each item of a list of texts or rows."""
    deeper = f"{indent} "
    if isinstance(value, dict) and not is_one_row(value):
        items = [
            f"{deeper}{json.dumps(key)}: {in_rows(each, deeper)}" for key, each in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, dict | str) for each in value):
        return "[\n" + ",\n".join(f"{deeper}{json.dumps(each)}" for each in value) + f"\n{indent}]"
    return json.dumps(value)


def is_one_row(value: dict[str, Any]) -> bool:
    """Whether a dictionary is a sample, or has nothing but numbers, texts and lists of numbers."""
    if "segments" in value or "trained" in value:
        return True
    lists = [each for each in value.values() if isinstance(each, list)]
    return not any(isinstance(each, dict) and each for each in value.values()) and not any(
        isinstance(item, dict | str) for each in lists for item in each
    )
