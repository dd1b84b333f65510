"""Folders that a command writes must not be those that it reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from openppo.config.shared import require


def refuse_overwriting(inputs: Mapping[str, str | None], outputs: Mapping[str, str]) -> None:
    """Refuse output folders that are input models, whatever the spelling.

    Of a PEFT folder the base model counts too. None stands for an option that is not given.
    """
    for flag, name in inputs.items():
        for read, what in ((name, "is"), (_base_of(name), "is the base model of")) if name else ():
            for written_by, folder in outputs.items():
                require(
                    read is None or not _same(read, folder),
                    f"{written_by} {folder} {what} {flag} {name}, which would be overwritten: choose another folder.",
                )


def refuse_own_checkpoints(inputs: Mapping[str, str | None], flag: str, folder: Path) -> None:
    """Refuse input models inside the run's own checkpoints in ``folder``."""
    for given, name in inputs.items():
        place = Path(os.path.realpath(name)) if name else folder
        inside = place.relative_to(folder).parts if folder in place.parents else ()
        require(
            not inside or not inside[0].startswith(("step_", "best_step_")),
            f"{given} {name} lies in a checkpoint in {folder}, where this run would replace it: choose another {flag}.",
        )


def _base_of(name: str) -> str | None:
    """Base model named by a PEFT folder; None for other folders."""
    try:
        described = json.loads((Path(name) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    base = described.get("base_model_name_or_path") if isinstance(described, dict) else None
    return base if isinstance(base, str) and base else None


def _same(one: str, other: str) -> bool:
    """Whether two paths lead to one folder, by link or spelling."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one is not there yet, or is a name on the hub
        return os.path.realpath(one) == os.path.realpath(other)
