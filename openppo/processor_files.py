"""Files of a model's image processor, copied beside a model that is saved."""

import json
import shutil
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def copy_processor(name: str, folder: Path) -> None:
    """Copy the processor files of model ``name``, if it has some, from its folder or the hub's cache.

    A PEFT folder has those of its base model.
    """
    if not name:
        return

    adapters = Path(name) / "adapter_config.json"
    if adapters.is_file():
        base = json.loads(adapters.read_text(encoding="utf-8")).get("base_model_name_or_path")
        name = base or name

    for file in _PROCESSOR_FILES:
        source = _find(name, file)
        if source is not None and source.is_file():
            shutil.copyfile(source, folder / file)


def _find(name: str, file: str) -> Path | None:
    """Path of ``file`` in the folder ``name``, or in the cache of the hub's model of that name."""
    if Path(name).is_dir():
        return Path(name) / file
    try:
        cached = try_to_load_from_cache(name, file)
    except HFValidationError:  # no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None
