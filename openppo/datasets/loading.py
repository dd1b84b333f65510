"""Data sources named on the command line -> rows.

Rows are plain dicts in the order of the source. Local data are read on every call, without a cache, so an edited
file is never served stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
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
    "--eval_data": "--eval_split",
}
"""The flag that chooses the split of a data flag, for messages."""
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "state.json", "config.json")


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[Row]:
    """The rows of ``source``, at most the first ``max_samples``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, a folder of such files, or
    else a hub name, ``owner/name`` or ``owner/name@configuration``. ``split`` chooses among the splits of a folder or
    a hub data set; a single file has none.
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


@dataclass(frozen=True)
class SourceRow:
    """A row, the name of its source, and its number there (from 1)."""

    row: Row
    source: str
    number: int


def number_rows(rows: Sequence[Row], source: str = "") -> list[SourceRow]:
    """``rows`` of one source, in order."""
    return [SourceRow(row, source, number) for number, row in enumerate(rows, start=1)]


def load_mixed_rows(
    sources: Sequence[tuple[str, float | None]],
    *,
    flag: str,
    split: str,
    max_samples: int | None,
    seed: int,
    dataset_class: str | None = None,
) -> list[SourceRow]:
    """The rows of several sources, at most ``max_samples`` of each, as ``config.parse_probs`` names them.

    Without shares: all rows, one source after the other. With shares: each next row comes from a source drawn by its
    share, until the first source is used up; the draws are those of ``datasets.interleave_datasets(probabilities=...,
    seed=..., stopping_strategy="first_exhausted")``, as in OpenRLHF. ``dataset_class`` loads each source instead of
    ``load_rows``. Raises ``ValueError`` naming the flag, the source and the remedy.
    """
    make = None if dataset_class is None else _import_from_file(dataset_class)
    loaded = []
    for source, _ in sources:
        if make is None:
            rows = load_rows(source, flag=flag, split=split, max_samples=max_samples)
        else:
            rows = _rows_made(
                make(source), f"--dataset_class {dataset_class}, called for {flag} {source},", max_samples
            )
        loaded.append(number_rows(rows, source))
    shares = [share for _, share in sources if share is not None]
    return _interleave(loaded, shares, seed) if shares else list(chain.from_iterable(loaded))


def _interleave(loaded: Sequence[Sequence[SourceRow]], shares: Sequence[float], seed: int) -> list[SourceRow]:
    assert len(loaded) == len(shares), f"{len(shares)} shares of {len(loaded)} sources"
    draws, mixed = np.random.default_rng(seed), []
    left = [iter(rows) for rows in loaded]
    missing = [len(rows) for rows in loaded]
    while True:
        for source in draws.choice(len(loaded), size=1000, p=shares):  # in blocks, for speed
            mixed.append(next(left[source]))
            missing[source] -= 1
            if missing[source] == 0:
                return mixed


def require_column(rows: Sequence[SourceRow], key: str, *, flag_of_key: str, flag_of_data: str) -> None:
    """Raise ``ValueError`` if any row lacks column ``key``: the row, its columns and the flag to change."""
    for row in rows:
        if key not in row.row:
            with naming_row(flag_of_data, row):
                raise ValueError(
                    f"no column {key!r}. Its columns are {', '.join(map(str, row.row))}: name one of them with "
                    f"{flag_of_key}."
                )


@contextmanager
def naming_row(flag: str, row: SourceRow) -> Iterator[None]:
    """Put the data's flag, the row and its source in front of any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        of_source = f" of {row.source}" if row.source else ""
        raise ValueError(f"{flag}, row {row.number}{of_source}: {error}") from error


def _rows_made(made: Any, where: str, max_samples: int | None) -> list[Row]:
    """The rows that the user's loader made."""
    try:
        items = iter(made)
    except TypeError as error:
        raise ValueError(f"{where} gave {type(made).__name__}; it must give rows to iterate over.") from error
    rows = list(islice(items, max_samples))
    strange = next((row for row in rows if not isinstance(row, dict)), None)
    if strange is not None:
        raise ValueError(f"{where} gave rows of {type(strange).__name__}; each must be a dict of its columns.")
    if not rows:
        raise ValueError(f"{where} gave no rows.")
    return rows


def _import_from_file(spec: str) -> Callable[[str], Any]:
    """What ``path.py:name`` names."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise ValueError(f"--dataset_class {spec}: give a Python file and a name in it, path.py:name.")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"--dataset_class {spec}: no such file {file}. Check the path.")
    module_spec = spec_from_file_location(f"dataset_class_{file.stem}", file)
    assert module_spec is not None and module_spec.loader is not None, f"no loader for {file}"
    module = module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look it up there
    try:
        module_spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ValueError(
            f"--dataset_class {spec}: cannot be imported ({error}). Install what it needs, or correct it."
        ) from error
    made = vars(module).get(name)
    if not callable(made):
        names = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(
            f"--dataset_class {spec}: no class or function {name!r}. It has: {', '.join(names) or 'none'}."
        )
    return made


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
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w.-]+)?", source) or data_suffix(Path(source)):
        raise ValueError(f"{missing} (it is not a hub name). Check the path.")
    name, _, configuration = source.partition("@")
    try:
        rows = load_dataset(name, configuration or None, split=split)
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
