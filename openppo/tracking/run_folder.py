"""Files of a run in its folder: options, environment, and logs and models of earlier runs."""

import itertools
import json
import os
import platform
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from openppo import __version__, logger
from openppo.tracking.card_file import CARD, is_replaceable
from openppo.tracking.output_files import replacing
from openppo.types import Comm
from openppo.weight_files import WEIGHTS, holds_model

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "datasets",
    "numpy",
    "vllm",
    "flash-attn",
    "bitsandbytes",
)
_BESIDE = (
    "*.safetensors.index.json",
    "generation_config.json",
    "model_config.json",
    "tokenizer*",
    "*.jinja",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "modeling_*.py",
    "configuration_*.py",
)
"""Files that transformers and peft write with the weights."""
_OF_RUNS = ("logs.[0-9]*", "checkpoints_*", "model.[0-9]*")
"""Names in the folder of an earlier run."""
RUN_FILES = ("config.yaml", "environment.json")
"""Files that ``save_run`` writes."""
LOG_STEP = re.compile(rb'\{"step": (\d+)')
"""Beginning of every line of our logs."""


def environment(comm: Comm) -> dict[str, Any]:
    """Return versions on this rank, and host and device of every rank. Collective."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = {"device": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1)}
    else:
        device = {
            "device": f"CPU ({platform.machine()})",
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        }

    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)

    return {
        "openppo": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "packages": packages,
        "world_size": comm.world_size,
        "ranks": comm.all_gather_object({"host": socket.gethostname(), **device}),
    }


def save_run(folder: Path, options: Mapping[str, object], environment: Mapping[str, Any]) -> None:
    """Write ``environment.json``, and ``options`` in their order to ``config.yaml``, which ``--config`` reads back."""
    folder.mkdir(parents=True, exist_ok=True)
    described = json.dumps(environment, indent=1)
    (folder / "environment.json").write_text(f"{described}\n", encoding="utf-8")

    plain = json.loads(json.dumps(options, default=_plain))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    """The value of an enum's member; other objects as text."""
    return getattr(value, "value", str(value))


def check_run_folder(folder: Path, models: Mapping[str, str]) -> None:
    """Refuse a folder with logs or a model of other programs.

    ``models`` are the folders, by flag, to which models will be written.
    """
    logs = folder / "logs"
    if logs.exists() and not _is_logs(logs):
        is_empty = logs.is_dir() and not any(logs.iterdir())
        if not is_empty:
            raise ValueError(
                f"--save_path {folder}: 'logs' in it is not of a run: rename it, or choose another folder."
            )

    is_run = _is_logs(logs) or any(any(folder.glob(name)) for name in _OF_RUNS)
    for flag, place in models.items():
        if holds_model(Path(place)) and not is_run:
            raise ValueError(
                f"{flag} {place} holds a model that no run has written there ({folder} has no logs): choose another "
                "folder."
            )


def set_aside_model(folder: Path) -> None:
    """Move the model of an earlier run to ``<folder>/model.1``, ``.2``, ..."""
    if not holds_model(folder):
        return

    aside = numbered(folder / "model")
    aside.mkdir()
    files: set[Path] = set()
    for pattern in (*WEIGHTS, *_BESIDE):
        files.update(filter(Path.is_file, folder.glob(pattern)))
    card = folder / CARD
    if card.is_file() and is_replaceable(card):  # one of a person describes the folder
        files.add(card)
    for file in sorted(files):
        file.rename(aside / file.name)
    logger.warning("the model of an earlier run is kept in %s", aside)


def set_aside_logs(folder: Path) -> None:
    """Rename the logs of an earlier run to ``<folder>.1``, ``.2``, ...: two runs never share a file."""
    if not _is_logs(folder):
        return
    aside = numbered(folder)
    folder.rename(aside)
    logger.info("logs of an earlier run are kept in %s", aside)


def _is_logs(folder: Path) -> bool:
    """True if a run wrote ``folder``: its options are there."""
    try:
        options = (folder / "config.yaml").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False
    return re.search(r"^save_path:", options, re.MULTILINE) is not None


def numbered(path: Path) -> Path:
    """Return ``path`` with the first free number after it: ``logs.1``."""
    candidates = (path.with_name(f"{path.name}.{n}") for n in itertools.count(1))
    return next(candidate for candidate in candidates if not candidate.exists())


def cut_logs(folder: Path, step: int) -> None:
    """Remove the lines after ``step`` from every JSON Lines file: a resumed run writes them again.

    The unfinished last line of a killed process goes too; lines that do not begin with a step stay.
    """
    for file in sorted(folder.glob("*.jsonl")):
        *lines, _ = file.read_bytes().split(b"\n")  # not splitlines: a logged text may hold U+2028
        kept = []
        for line in lines:
            match = LOG_STEP.match(line)
            if match is None or int(match[1]) <= step:
                kept.append(line + b"\n")
        with replacing(file) as new:
            new.write_bytes(b"".join(kept))
