"""Files of a run in its folder: options, environment, and logs and models of earlier runs."""

import itertools
import json
import logging
import os
import platform
import re
import socket
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from openppo import __version__
from openppo.types import Comm

logger = logging.getLogger("openppo")

PACKAGES = ("torch", "deepspeed", "transformers", "peft", "datasets", "numpy", "vllm", "flash-attn", "bitsandbytes")
_WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
_BESIDE = (
    *("*.safetensors.index.json", "generation_config.json", "model_config.json", "tokenizer*", "*.jinja", "*.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "modeling_*.py", "configuration_*.py"),
)
"""Files that transformers and peft write with the weights."""
_OF_RUNS = ("logs.[0-9]*", "checkpoints_*", "model.[0-9]*")


def environment(comm: Comm) -> dict[str, Any]:
    """Versions on this rank, and host and device of every rank. Collective."""
    return {
        "openppo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "world_size": comm.world_size,
        "ranks": comm.all_gather_object({"host": socket.gethostname(), **_device()}),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {"device": found.name, "memory_gib": round(found.total_memory / 2**30, 1)}
    return {"device": f"CPU ({platform.machine()})", "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def save_environment(folder: Path, found: Mapping[str, Any]) -> None:
    """Write ``<folder>/environment.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def save_config(folder: Path, options: Mapping[str, object]) -> None:
    """Write ``options`` to ``<folder>/config.yaml`` in their order; ``--config`` reads the file back."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(_plain(options), sort_keys=False, allow_unicode=True, default_flow_style=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _plain(value: object) -> object:
    """``value`` in YAML's own types: tuples become lists, paths and enums their text."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def check_run_folder(folder: Path, models: Mapping[str, str]) -> None:
    """Refuse a folder with logs or a model of other programs.

    ``models`` are the folders, by flag, to which models will be written.
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
    """Whether ``folder`` has weights of a model or of adapters."""
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
    """Whether a run wrote ``folder``: its options are there."""
    try:
        return re.search(r"^save_path:", (folder / "config.yaml").read_text(encoding="utf-8"), re.MULTILINE) is not None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


def _is_run(folder: Path) -> bool:
    return _is_logs(folder / "logs") or any(True for name in _OF_RUNS for _ in folder.glob(name))


def _numbered(path: Path) -> Path:
    """``path`` with the first free number after it."""
    return next(new for n in itertools.count(1) if not (new := path.with_name(f"{path.name}.{n}")).exists())


def cut_logs(folder: Path, step: int) -> None:
    """Remove the lines after ``step`` from every JSON Lines file: a resumed run writes them again.

    The unfinished last line of a killed process goes too. Lines without a step stay, with a warning.
    """
    for file in sorted(folder.glob("*.jsonl")):
        *lines, last = file.read_bytes().split(b"\n")  # not splitlines: a logged text may hold U+2028
        steps = [_step_of(line) for line in lines]
        unknown = [number for number, found in enumerate(steps, start=1) if found is None and lines[number - 1].strip()]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            logger.warning("%s, line %d%s: not JSON with a number as 'step'; kept as it is", file, unknown[0], more)
        kept = [line for line, found in zip(lines, steps, strict=True) if found is None or found <= step]
        if last and (found := _step_of(last)) is not None and found <= step:
            kept.append(last)  # only its newline is missing
        new = file.with_name(f".{file.name}.new")
        new.write_bytes(b"".join(line + b"\n" for line in kept))
        new.replace(file)


def _step_of(line: bytes) -> float | None:
    """The step of a log line, if it has one."""
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None
