"""Options of a model's config that are overridden while the model runs; saved files have the original values."""

import json
from pathlib import Path
from typing import Any

KEY = "overridden_by_openppo"
"""Entry of a config with the original values of overridden options, by name."""


def override(config: Any, name: str, value: Any) -> None:
    """Set an option of a transformers config, and keep its original value in the config."""
    originals = vars(config).setdefault(KEY, {})
    originals.setdefault(name, getattr(config, name))
    setattr(config, name, value)


def restore_overridden(file: Path) -> None:
    """Rewrite the JSON file of a config with the original values of its options."""
    text = file.read_text(encoding="utf-8")
    if KEY in text:
        restored = json.dumps(_restored(json.loads(text)), indent=2, sort_keys=True)
        file.write_text(f"{restored}\n", encoding="utf-8")


def _restored(value: Any) -> Any:
    """A config, or a value in one, without overrides; configs lie inside configs."""
    if not isinstance(value, dict):
        return value
    restored = {name: _restored(part) for name, part in value.items() if name != KEY}
    return restored | value.get(KEY, {})
