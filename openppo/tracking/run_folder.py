"""What a run leaves in its folder beside the model."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import yaml

logger = logging.getLogger("openppo")

_WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
_BESIDE = (
    *("*.safetensors.index.json", "generation_config.json", "model_config.json", "tokenizer*", "*.jinja", "*.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "modeling_*.py", "configuration_*.py"),
)
"""What transformers and peft write with a model."""
_OF_RUNS = ("logs.[0-9]*", "checkpoints_*", "model.[0-9]*")


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


def check_run_folder(folder: Path, models: Mapping[str, str]) -> None:
    """Refuse a folder with logs or a model of other programs.

    ``models`` are folders by flag that will receive models: ``folder``, and the critic's beside it.
    """
    logs = folder / "logs"
    try:
        foreign = logs.exists() and not _is_logs(logs) and not (logs.is_dir() and next(logs.iterdir(), None) is None)
    except OSError as error:
        raise ValueError(f"--save_path {folder}: cannot be read ({error}); choose another folder.") from error
    if foreign:
        raise ValueError(f"--save_path {folder}: 'logs' in it is not of a run: rename it, or choose another folder.")
    for flag, place in models.items():
        if holds_model(Path(place)) and not _is_run(folder):
            raise ValueError(
                f"{flag} {place} holds a model that no run has written there ({folder} has no logs): choose another "
                "folder."
            )


def holds_model(folder: Path) -> bool:
    """Whether ``folder`` has files of a model or of adapters."""
    return any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))


def set_aside_model(folder: Path) -> None:
    """Move the model of an earlier run to ``<folder>/model.1``, ``.2``, ..."""
    if not holds_model(folder):
        return
    aside = _numbered(folder / "model")
    aside.mkdir()
    for file in sorted({file for pattern in (*_WEIGHTS, *_BESIDE) for file in folder.glob(pattern) if file.is_file()}):
        file.rename(aside / file.name)
    logger.warning("the model of an earlier run is kept in %s", aside)


def set_aside_logs(folder: Path) -> None:
    """Rename the logs of an earlier run to ``<folder>.1``, ``.2``, ...: two runs never share a file."""
    if not _is_logs(folder):
        return
    aside = _numbered(folder)
    folder.rename(aside)
    logger.info("logs of an earlier run are kept in %s", aside)


def _is_logs(folder: Path) -> bool:
    """Whether a run has written ``folder``: its options begin each run's logs."""
    try:
        return re.search(r"^save_path:", (folder / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _is_run(folder: Path) -> bool:
    return _is_logs(folder / "logs") or any(True for name in _OF_RUNS for _ in folder.glob(name))


def _numbered(path: Path) -> Path:
    """``path`` with the first free number behind it."""
    return next(new for n in itertools.count(1) if not (new := path.with_name(f"{path.name}.{n}")).exists())


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
