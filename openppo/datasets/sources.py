"""Data sources named on the command line -> rows in their order: files, folders, and data sets of ``datasets``."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    interleave_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError
from huggingface_hub import constants

from openppo.config import RowsConfig, parse_probs
from openppo.datasets.file_formats import Row, without_added_keys
from openppo.datasets.files import (
    Place,
    files_of_split,
    find_place,
    is_data_file,
    read_file,
    require_split,
)
from openppo.user_code import leaving_no_trace, load_callable

_UNREADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    OverflowError,
    DatasetsError,
    pa.ArrowException,
)
"""Errors of ``datasets`` for damaged files and for dates that Python cannot hold."""


@dataclass(frozen=True)
class SourceRow:
    """A row, the name of its source, its number there, from 1, and the flag that names the source."""

    row: Row
    source: str
    number: int
    flag: str


ShowRows = Callable[[Sequence[SourceRow]], Iterable[SourceRow]]
"""Iterator over rows with a progress bar: tokenizing many takes minutes."""


def number_rows(rows: Iterable[Row], source: str = "", flag: str = "--dataset") -> list[SourceRow]:
    """Number the ``rows`` of one source, in order."""
    numbered = enumerate(rows, start=1)
    return [SourceRow(row, source, number, flag=flag) for number, row in numbered]


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[SourceRow]:
    """Load the first ``max_samples`` rows of ``source``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, or a folder of such files, all
    also at an address of fsspec (``s3://bucket/rows.jsonl``), or else a hub name, ``owner/name`` or
    ``owner/name@configuration``. ``split`` chooses among the splits of a folder or a hub data set; a file has none.
    Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the source and the remedy.
    """
    place = find_place(source, flag)
    loaded: Iterable[Row]
    with place.naming_errors(flag):
        if place.is_file():
            loaded = read_file(place, flag)
        elif place.is_dir() and not _is_saved_by_datasets(place):
            files = files_of_split(place, flag, split)
            loaded = chain.from_iterable(read_file(file, flag) for file in files)
        else:
            loaded = _load_by_datasets(place, flag, split, max_samples=max_samples)
        rows = number_rows(islice(loaded, max_samples), place.name, flag)

    if not rows:
        raise ValueError(
            f"{flag} {place.name}: empty, it has no rows. Choose another file or split."
        )
    return rows


def _is_saved_by_datasets(folder: Place) -> bool:
    return any(folder.inside(name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_mixed_rows(
    options: RowsConfig, sources: str, probs: str | None = None, *, flag: str, split: str, seed: int
) -> list[SourceRow]:
    """Load the rows of ``sources``, separated by commas, at most ``--max_samples`` of each.

    Without ``probs``: all rows, one source after the other. With these shares: each next row comes from a source drawn
    by its share, until the first source is used up, as in OpenRLHF. ``--dataset_class`` loads each source instead of
    ``load_rows``. Raises ``ValueError`` naming the flag, the source and the remedy.
    """
    pairs = parse_probs(sources, probs, flag.removeprefix("--"))
    limit = options.max_samples
    make_table = None
    if options.dataset_class is not None:
        make_table = load_callable(options.dataset_class, "--dataset_class")

    loaded = []
    for source, _ in pairs:
        if make_table is None:
            rows = load_rows(source, flag=flag, split=split, max_samples=limit)
        else:
            place = f"--dataset_class {options.dataset_class}, called for {flag} {source},"
            rows = number_rows(_rows_of_table(make_table, source, limit, place=place), source, flag)
        loaded.append(rows)

    shares = [share for _, share in pairs if share is not None]
    if shares:
        return _interleave(loaded, shares, seed)
    return list(chain.from_iterable(loaded))


def _rows_of_table(
    make_table: Callable[[str], Any], source: str, limit: int | None, place: str
) -> list[Row]:
    """Load the first ``limit`` rows of a user's table; ``place`` names it in errors."""
    with leaving_no_trace(place):
        table = make_table(source)
        rows = list(islice(table, limit))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{place} must give one row or more, each a dict of its columns.")
    if isinstance(table, Dataset | IterableDataset):
        rows = list(map(without_added_keys, rows))
    return rows


def value_of(row: Row, key: str, flag: str) -> Any:
    """Return the value in column ``key``, which ``flag`` names; dots descend into objects.

    Raises ``ValueError`` if the column is missing.
    """
    values = descend(row, key)
    if not values:
        columns = ", ".join(map(str, row))
        raise ValueError(
            f"no column {key!r}. Its columns are {columns}: name one of them with {flag}."
        )
    return values[0]


def descend(value: Any, key: str) -> list[Any]:
    """Return the value that ``key`` names in an object, as a list of one, or an empty list.

    The longest name at each level counts, so a name with dots wins.

    >>> descend({"answer": {"text": "4"}}, "answer.text")
    ['4']
    >>> descend({"answer.text": "four", "answer": {"text": "4"}}, "answer.text")
    ['four']
    """
    if not isinstance(value, dict):
        return []
    if key in value:
        return [value[key]]

    names = key.split(".")
    for n in range(len(names) - 1, 0, -1):
        name = ".".join(names[:n])
        if name in value:
            values = descend(value[name], ".".join(names[n:]))
            if values:
                return values
    return []


@contextmanager
def naming_row(row: SourceRow) -> Iterator[None]:
    """Name flag, row and source of the data in any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        source = f" of {row.source}" if row.source else ""
        raise ValueError(f"{row.flag}, row {row.number}{source}: {error}") from error


def _interleave(
    loaded: Sequence[Sequence[SourceRow]], shares: list[float], seed: int
) -> list[SourceRow]:
    """Draw rows by ``shares`` until the first source is used up."""
    all_rows = list(chain.from_iterable(loaded))
    numbers = iter(range(len(all_rows)))
    places = []
    for rows in loaded:
        source_places = list(islice(numbers, len(rows)))
        places.append(Dataset.from_dict({"place": source_places}))

    mixed = interleave_datasets(places, shares, seed=seed, stopping_strategy="first_exhausted")
    return [all_rows[place] for place in mixed["place"][:]]


def _load_by_datasets(place: Place, flag: str, split: str, max_samples: int | None) -> list[Row]:
    """Load rows of a folder saved by ``datasets`` or of a data set of the hub."""
    source = place.name
    is_dir = place.is_dir()
    name = re.fullmatch(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w.-]+))?", source)
    try:
        if is_dir:
            saved = load_from_disk(place.address)
            splits = saved if isinstance(saved, DatasetDict) else {split: saved}
        elif name is None or is_data_file(place):
            raise FileNotFoundError("not a name on the hub")
        else:
            splits = {split: load_dataset(name[1], name[2], split=split)}

        rows: list[Row] = []
        n_rows = len(splits.get(split, ()))
        if n_rows:
            rows = splits[split].take(min(max_samples or n_rows, n_rows)).to_list()
        rows = list(map(without_added_keys, rows))
    except _UNREADABLE as error:
        if is_dir:
            problem = "a folder saved by 'datasets' that cannot be read"
            remedy = "Save it again, strange dates as text."
        else:
            problem = (
                f"no such file or folder, and split {split!r} of a data set of that name cannot be loaded "
                "from the hub"
            )
            remedy = "Check the path, the name, the split and the network."
            if constants.HF_HUB_OFFLINE:
                remedy = (
                    "HF_HUB_OFFLINE is set: unset it, or name a folder that save_to_disk of 'datasets' "
                    "has written."
                )
        raise ValueError(f"{flag} {source}: {problem} ({error!r}). {remedy}") from error

    require_split(split, splits, flag, name=place.name)
    return rows
