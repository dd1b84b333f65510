"""A data source named on the command line -> rows.

Rows are plain dicts in the order of the source. Local data are read on every call, without a cache, so an edited
file is never served stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError

from openppo.datasets.formats import Row, data_suffix, read_file

SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in a file's name that put it into a split."""
SPLIT_FLAGS = {
    "--prompt_data": "--prompt_split",
    "--pretrain_data": "--pretrain_split",
    "--dataset": "--dataset_split",
    "--eval_dataset": "--eval_split",
}
"""The flag that chooses the split of a data flag, for messages."""
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "state.json", "config.json")


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[Row]:
    """The rows of ``source``, at most the first ``max_samples``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, a folder of such files, or
    else a hub name. ``split`` chooses among the splits of a folder or a hub data set; a single file has none.
    Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the source and the remedy.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = list(islice(read_file(path, flag), max_samples))
    elif path.is_dir():
        rows = _load_folder(path, flag, split, max_samples)
    else:
        rows = _load_from_hub(source, flag, split, max_samples)
    if not rows:
        raise ValueError(f"{flag} {source}: empty, it has no rows. Choose another file or split.")
    return rows


def require_column(rows: Sequence[Row], key: str, *, flag_of_key: str, flag_of_data: str) -> None:
    """Raise ``ValueError`` if any row lacks column ``key``: the row (1-based), its columns and the flag to change."""
    for number, row in enumerate(rows, start=1):
        if key not in row:
            raise ValueError(
                f"{flag_of_data}, row {number}: no column {key!r}. Its columns are {', '.join(map(str, row))}: "
                f"name one of them with {flag_of_key}."
            )


@contextmanager
def naming_row(flag: str, number: int) -> Iterator[None]:
    """Put the data's flag and the row number (1-based) in front of any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}, row {number}: {error}") from error


def _load_folder(path: Path, flag: str, split: str, max_samples: int | None) -> list[Row]:
    try:
        if (path / "dataset_dict.json").is_file():
            splits = DatasetDict.load_from_disk(str(path))
            _require_split(split, sorted(splits), flag, path)
            return _head(splits[split], max_samples)
        if (path / "state.json").is_file():
            return _head(Dataset.load_from_disk(str(path)), max_samples)
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: a folder saved by 'datasets' that cannot be read ({error}). Save it again."
        ) from error
    files = _files_of_split(path, flag, split)
    return list(islice(chain.from_iterable(read_file(file, flag) for file in files), max_samples))


def _files_of_split(folder: Path, flag: str, split: str) -> list[Path]:
    """Data files of one split in ``folder``, else in its subfolder 'data', by name."""
    for place in (folder, folder / "data"):
        by_split: dict[str, list[Path]] = {}
        for file in sorted(place.glob("*")):
            if file.is_file() and data_suffix(file) and file.name not in METADATA_FILES:
                by_split.setdefault(_split_of_name(file.name, split), []).append(file)
        if by_split:
            break
    else:
        raise ValueError(
            f"{flag} {folder}: no data file in this folder. Name a .jsonl, .json, .csv or .parquet file, a folder "
            "of them, or a folder saved by 'datasets'."
        )
    _require_split(split, sorted(by_split), flag, folder)
    files = by_split[split]
    if len({data_suffix(file) for file in files}) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{flag} {folder}: files of several kinds for split {split!r} ({names}). Name one file.")
    return files


def _split_of_name(name: str, wanted: str) -> str:
    words = re.split(r"[^a-z0-9]+", name.lower())
    if wanted.lower() in words:
        return wanted
    return next((split for split, names in SPLIT_WORDS.items() if any(word in names for word in words)), "train")


def _require_split(split: str, splits: list[str], flag: str, path: Path) -> None:
    if split not in splits:
        raise ValueError(
            f"{flag} {path}: no split {split!r}. Its splits are {', '.join(splits)}: choose one with "
            f"{SPLIT_FLAGS.get(flag, 'the split option')}."
        )


def _load_from_hub(source: str, flag: str, split: str, max_samples: int | None) -> list[Row]:
    missing = f"{flag} {source}: no such file or folder, and no data set of that name could be loaded from the hub"
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) or data_suffix(Path(source)):
        raise ValueError(f"{missing} (it is not a hub name). Check the path.")
    try:
        rows = load_dataset(source, split=split)
    except (ValueError, RuntimeError) as error:  # it exists, but not with this split or not as plain data
        raise ValueError(f"{flag} {source}: split {split!r} could not be loaded from the hub: {error}") from error
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"{missing} ({type(error).__name__}: {error}). Check the path, the name and the network."
        ) from error
    return _head(rows, max_samples)


def _head(rows: Dataset, max_samples: int | None) -> list[Row]:
    count = len(rows) if max_samples is None else min(max_samples, len(rows))
    head: list[Row] = rows.select(range(count)).to_list()
    return head
