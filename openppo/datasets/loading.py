"""Data sources named on the command line -> rows.

Rows are plain dicts in the order of the source. Local data are read on every call, without a cache, so an edited
file is never served stale.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError

from openppo.datasets.formats import PlacedRow, Row, data_suffix, read_file
from openppo.user_code import leaving_no_trace, load_callable

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class SourceRow:
    """A row, the name of its source, its number there (from 1), and its place in the file, if known: "line 3"."""

    row: Row
    source: str
    number: int
    place: str = ""


ShowRows = Callable[[Sequence[SourceRow]], Iterable[SourceRow]]
"""Gives the rows and tells how far they are: tokenizing many takes minutes."""


def number_rows(rows: Iterable[Row], source: str = "") -> list[SourceRow]:
    """``rows`` of one source, in order."""
    return [SourceRow(row, source, number) for number, row in enumerate(rows, start=1)]


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[SourceRow]:
    """The rows of ``source``, at most the first ``max_samples``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, a folder of such files, or
    else a hub name, ``owner/name`` or ``owner/name@configuration``. ``split`` chooses among the splits of a folder or
    a hub data set; a single file has none.
    Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the source and the remedy.
    """
    path = Path(source).expanduser()
    placed: Iterable[PlacedRow]
    if path.is_file():
        placed = read_file(path, flag)
    elif path.is_dir():
        placed = _load_folder(path, flag, split, max_samples)
    else:
        placed = _unplaced(_load_from_hub(source, flag, split, max_samples))
    rows = [SourceRow(row, source, n, place) for n, (row, place) in enumerate(islice(placed, max_samples), start=1)]
    if not rows:
        raise ValueError(f"{flag} {source}: empty, it has no rows. Choose another file or split.")
    return rows


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
    make = None if dataset_class is None else load_callable(dataset_class, "--dataset_class")
    loaded = []
    for source, _ in sources:
        if make is None:
            loaded.append(load_rows(source, flag=flag, split=split, max_samples=max_samples))
        else:
            where = f"--dataset_class {dataset_class}, called for {flag} {source},"
            with leaving_no_trace(where):
                loaded.append(number_rows(_rows_made(make(source), where, max_samples), source))
    shares = [share for _, share in sources if share is not None]
    rows = _interleave(loaded, shares, seed) if shares else list(chain.from_iterable(loaded))
    n_different = len({hash(repr(row.row)) for row in rows})  # by their hash, so that no second copy is in memory
    if n_different < len(rows):
        logger.info("%s: %d of %d rows are copies of others; they are kept", flag, len(rows) - n_different, len(rows))
    return rows


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
        place = f" ({row.place})" if row.place not in ("", f"row {row.number}") else ""
        raise ValueError(f"{flag}, row {row.number}{of_source}{place}: {error}") from error


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


def _load_folder(path: Path, flag: str, split: str, max_samples: int | None) -> Iterator[PlacedRow]:
    try:
        saved: Any = None
        if (path / "dataset_dict.json").is_file():
            saved = DatasetDict.load_from_disk(str(path))
        elif (path / "state.json").is_file():
            saved = {split: Dataset.load_from_disk(str(path))}
        rows = _head(saved[split], max_samples) if saved is not None and split in saved else []
    except (OSError, ValueError, KeyError, TypeError, OverflowError, pa.ArrowException) as error:  # or damaged JSON
        raise ValueError(
            f"{flag} {path}: a folder saved by 'datasets' that cannot be read ({error!r}). Save it again, dates and "
            "times that are out of range as text."
        ) from error
    if saved is not None:
        _require_split(split, sorted(saved), flag, path)
        yield from _unplaced(rows)
        return
    for file in _files_of_split(path, flag, split):
        place = ""
        for row, place in read_file(file, flag):
            yield row, f"{file.name}, {place}"
        if not place:
            logger.warning("%s %s: empty, it has no rows", flag, file)


def _unplaced(rows: Iterable[Row]) -> Iterator[PlacedRow]:
    return ((row, "") for row in rows)


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
        return _head(load_dataset(name, configuration or None, split=split), max_samples)
    except (ValueError, RuntimeError, OverflowError) as error:  # it exists, but without this split or no plain data
        raise ValueError(f"{flag} {source}: split {split!r} could not be loaded from the hub: {error}") from error
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"{missing} ({type(error).__name__}: {error}). Check the path, the name and the network."
        ) from error


def _head(rows: Dataset, max_samples: int | None) -> list[Row]:
    count = len(rows) if max_samples is None else min(max_samples, len(rows))
    head: list[Row] = rows.select(range(count)).to_list()
    return head
