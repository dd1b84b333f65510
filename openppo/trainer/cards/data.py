"""Data of a run as its card names them: files with hashes, data sets of the hub with commits."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from openppo.config import Options
from openppo.config.command_line import without_folders
from openppo.config.fields import given_options, mask_credentials
from openppo.sources.task import Task

_FLAGS = ("prompt_data", "eval_data", "pretrain_data", "dataset", "eval_dataset")
_SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz"}


def describe_data(config: Options, tasks: Sequence[Task] = ()) -> list[dict[str, str]]:
    """Return flag, name and digest of each source of data, once.

    ``{"flag": "--prompt_data", "name": "prompts.jsonl", "sha256": "9f86..."}``; a data set of the hub has a ``commit``
    instead, if its cache tells it, and an address neither.
    """
    sources: dict[tuple[str, str], dict[str, str]] = {}
    for options in [given_options(config), *(given_options(task.config) for task in tasks)]:
        for flag in _FLAGS:
            for source in (options.get(flag) or "").split(","):
                key = (flag, source.strip())
                if key[1] and key not in sources:
                    sources[key] = {"flag": f"--{flag}", **_described(key[1])}
    return list(sources.values())


def _described(source: str) -> dict[str, str]:
    """Name and digest of one source."""
    if "://" in source:
        return {"name": mask_credentials(source)}
    path = Path(source).expanduser()
    with suppress(OSError):  # what was read may be gone, or be none that this user may list
        if path.is_file():
            return {"name": path.name, "sha256": _sha256(path)}
        if path.is_dir():
            return {"name": f"{path.resolve().name}/", "sha256": _sha256_of_folder(path)}
    with suppress(HFValidationError):
        cached = try_to_load_from_cache(source.partition("@")[0], "README.md", repo_type="dataset")
        if isinstance(cached, str):
            return {"name": source, "commit": Path(cached).parent.name}
    return {"name": without_folders(source)}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sha256_of_folder(folder: Path) -> str:
    """Digest of the lines that ``sha256sum`` prints for the data files in a folder, sorted by name."""
    files = [file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file()]
    lines = [f"{_sha256(file)}  {file.relative_to(folder)}\n" for file in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_of_hub(entry: Mapping[str, str]) -> bool:
    """True for a source that is a data set of the hub, by the form of its name."""
    if "commit" in entry:
        return True
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w.-]+)?", entry["name"]) is not None
    return is_name and "sha256" not in entry and Path(entry["name"]).suffix not in _SUFFIXES
