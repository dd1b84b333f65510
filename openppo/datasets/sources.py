"""Data sources named on the command line -> rows in their order: files, folders, and what ``datasets`` reads."""

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
from openppo.datasets.files import (
    Place,
    Row,
    files_of_split,
    find_place,
    is_data_file,
    read_file,
    require_split,
    without_added_keys,
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
"""What ``datasets`` raises for damaged files and for dates that Python cannot hold."""


@dataclass(frozen=True)
class SourceRow:
    """A row, the name of its source, its number there, from 1, and the flag that names the source."""

    row: Row
    source: str
    number: int
    flag: str


ShowRows = Callable[[Sequence[SourceRow]], Iterable[SourceRow]]
"""Iterates over rows with a progress bar: tokenizing many takes minutes."""


def number_rows(rows: Iterable[Row], source: str = "", flag: str = "--dataset") -> list[SourceRow]:
    """``rows`` of one source, in order."""
    return [SourceRow(row, source, number, flag=flag) for number, row in enumerate(rows, start=1)]


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[SourceRow]:
    """The first ``max_samples`` rows of ``source``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, or a folder of such files, all
    also at an address of fsspec (``s3://bucket/rows.jsonl``), or else a hub name, ``owner/name`` or
    ``owner/name@configuration``. ``split`` chooses among the splits of a folder or a hub data set; a file has none.
    Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the source and the remedy.
    """
    place = find_place(source, flag)
    found: Iterable[Row]
    with place.naming_errors(flag):
        if place.is_file():
            found = read_file(place, flag)
        elif place.is_dir() and not any(
            place.inside(name).is_file() for name in ("dataset_dict.json", "state.json")
        ):
            found = chain.from_iterable(
                read_file(file, flag) for file in files_of_split(place, flag, split)
            )
        else:
            found = _load_by_datasets(place, flag, split, max_samples=max_samples)
        rows = number_rows(islice(found, max_samples), place.name, flag)
    if not rows:
        raise ValueError(
            f"{flag} {place.name}: empty, it has no rows. Choose another file or split."
        )
    return rows


def load_mixed_rows(
    options: RowsConfig, sources: str, probs: str | None = None, *, flag: str, split: str, seed: int
) -> list[SourceRow]:
    """Rows of ``sources``, several with commas, at most ``--max_samples`` of each.

    Without ``probs``: all rows, one source after the other. With these shares: each next row comes from a source drawn
    by its share, until the first source is used up, as in OpenRLHF. ``--dataset_class`` loads each source instead of
    ``load_rows``. Raises ``ValueError`` naming the flag, the source and the remedy.
    """
    pairs, limit = parse_probs(sources, probs, flag.removeprefix("--")), options.max_samples
    if options.dataset_class is None:
        loaded = [
            load_rows(source, flag=flag, split=split, max_samples=limit) for source, _ in pairs
        ]
    else:
        make = load_callable(options.dataset_class, "--dataset_class")
        loaded = []
        for source, _ in pairs:
            where = f"--dataset_class {options.dataset_class}, called for {flag} {source},"
            with leaving_no_trace(where):
                table = make(source)
                made = list(islice(table, limit))
            if not made or not all(isinstance(row, dict) for row in made):
                raise ValueError(f"{where} must give one row or more, each a dict of its columns.")
            if isinstance(table, Dataset | IterableDataset):
                made = list(map(without_added_keys, made))
            loaded.append(number_rows(made, source, flag))
    shares = [share for _, share in pairs if share is not None]
    return _interleave(loaded, shares, seed) if shares else list(chain.from_iterable(loaded))


def value_of(row: Row, key: str, flag: str) -> Any:
    """The value in column ``key``, which ``flag`` names, or ``ValueError``; dots descend into objects."""
    if not (found := descend(row, key)):
        columns = ", ".join(map(str, row))
        raise ValueError(
            f"no column {key!r}. Its columns are {columns}: name one of them with {flag}."
        )
    return found[0]


def descend(value: Any, key: str) -> list[Any]:
    """What ``key`` names in an object, if anything: the longest name at each level, so one with dots wins."""
    if not isinstance(value, dict) or key in value:
        return [value[key]] if isinstance(value, dict) else []
    names = key.split(".")
    splits = ((".".join(names[:n]), ".".join(names[n:])) for n in range(len(names) - 1, 0, -1))
    return next(
        (found for name, rest in splits if name in value and (found := descend(value[name], rest))),
        [],
    )


@contextmanager
def naming_row(row: SourceRow) -> Iterator[None]:
    """Put the data's flag, the row and its source in front of any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        of_source = f" of {row.source}" if row.source else ""
        raise ValueError(f"{row.flag}, row {row.number}{of_source}: {error}") from error


def _interleave(
    loaded: Sequence[Sequence[SourceRow]], shares: list[float], seed: int
) -> list[SourceRow]:
    every = list(chain.from_iterable(loaded))
    numbers = iter(range(len(every)))
    places = [Dataset.from_dict({"place": list(islice(numbers, len(rows)))}) for rows in loaded]
    mixed = interleave_datasets(places, shares, seed=seed, stopping_strategy="first_exhausted")
    return [every[place] for place in mixed["place"][:]]


def _load_by_datasets(place: Place, flag: str, split: str, max_samples: int | None) -> list[Row]:
    """Rows of a folder saved by ``datasets`` or of a data set of the hub."""
    source, is_dir = place.name, place.is_dir()
    name = re.fullmatch(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w.-]+))?", source)
    try:
        if is_dir:
            saved = load_from_disk(place.address)
            splits = saved if isinstance(saved, DatasetDict) else {split: saved}
        elif name is None or is_data_file(place):
            raise FileNotFoundError("not a name on the hub")
        else:
            splits = {split: load_dataset(name[1], name[2], split=split)}
        n_rows = len(splits.get(split, ()))
        rows: list[Row] = (
            splits[split].take(min(max_samples or n_rows, n_rows)).to_list() if n_rows else []
        )
        rows = list(map(without_added_keys, rows))
    except _UNREADABLE as error:
        what = f"no such file or folder, and split {split!r} of a data set of that name cannot be loaded from the hub"
        remedy = "Check the path, the name, the split and the network."
        if constants.HF_HUB_OFFLINE:
            remedy = "HF_HUB_OFFLINE is set: unset it, or name a folder that save_to_disk of 'datasets' has written."
        if is_dir:
            what, remedy = (
                "a folder saved by 'datasets' that cannot be read",
                "Save it again, strange dates as text.",
            )
        raise ValueError(f"{flag} {source}: {what} ({error!r}). {remedy}") from error
    require_split(split, splits, flag, name=place.name)
    return rows
