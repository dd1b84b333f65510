"""Data sources named on the command line -> rows in their order.

``datasets`` reads the hub and saved folders. Files are read here, because it changes values (in JSON a text like
"2020-01-01" becomes a date, missing keys become None), passes CSV lines with too few fields and verifies no checksums
of Parquet. Local files are read on every call, without a cache.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, interleave_datasets, load_dataset, load_from_disk
from datasets.data_files import FILES_TO_IGNORE, SPLIT_KEYWORDS
from datasets.exceptions import DatasetsError

from openppo.config import RowsConfig, parse_probs
from openppo.user_code import leaving_no_trace, load_callable

Row = dict[str, Any]
"""One row of data: column name -> value."""

JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, TypeError, OverflowError, DatasetsError, pa.ArrowException)
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
    return [SourceRow(row, source, number, flag) for number, row in enumerate(rows, start=1)]


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[SourceRow]:
    """The first ``max_samples`` rows of ``source``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, a folder of such files, or
    else a hub name, ``owner/name`` or ``owner/name@configuration``. ``split`` chooses among the splits of a folder or
    a hub data set; a single file has none. Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the
    source and the remedy.
    """
    path = Path(source).expanduser()
    found: Iterable[Row]
    if path.is_file():
        found = _read_file(path, flag)
    elif path.is_dir() and not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        found = chain.from_iterable(_read_file(file, flag) for file in _files_of_split(path, flag, split))
    else:
        found = _load_by_datasets(source, flag, split, max_samples)
    rows = number_rows(islice(found, max_samples), source, flag)
    if not rows:
        raise ValueError(f"{flag} {source}: empty, it has no rows. Choose another file or split.")
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
        loaded = [load_rows(source, flag=flag, split=split, max_samples=limit) for source, _ in pairs]
    else:
        make = load_callable(options.dataset_class, "--dataset_class")
        loaded = []
        for source, _ in pairs:
            where = f"--dataset_class {options.dataset_class}, called for {flag} {source},"
            with leaving_no_trace(where):
                made = list(islice(make(source), limit))
            if not made or not all(isinstance(row, dict) for row in made):
                raise ValueError(f"{where} must give one row or more, each a dict of its columns.")
            loaded.append(number_rows(made, source, flag))
    shares = [share for _, share in pairs if share is not None]
    return _interleave(loaded, shares, seed) if shares else list(chain.from_iterable(loaded))


def value_of(row: Row, key: str, flag: str) -> Any:
    """The value in column ``key``, which ``flag`` names, or ``ValueError``; dots descend into objects."""
    if not (found := descend(row, key)):
        columns = ", ".join(map(str, row))
        raise ValueError(f"no column {key!r}. Its columns are {columns}: name one of them with {flag}.")
    return found[0]


def descend(value: Any, key: str) -> list[Any]:
    """What ``key`` names in an object, if anything: the longest name at each level, so one with dots wins."""
    if not isinstance(value, dict) or key in value:
        return [value[key]] if isinstance(value, dict) else []
    names = key.split(".")
    splits = ((".".join(names[:n]), ".".join(names[n:])) for n in range(len(names) - 1, 0, -1))
    return next((found for name, rest in splits if name in value and (found := descend(value[name], rest))), [])


@contextmanager
def naming_row(row: SourceRow) -> Iterator[None]:
    """Put the data's flag, the row and its source in front of any ``ValueError`` raised inside."""
    try:
        yield
    except ValueError as error:
        of_source = f" of {row.source}" if row.source else ""
        raise ValueError(f"{row.flag}, row {row.number}{of_source}: {error}") from error


def _interleave(loaded: Sequence[Sequence[SourceRow]], shares: list[float], seed: int) -> list[SourceRow]:
    every = list(chain.from_iterable(loaded))
    numbers = iter(range(len(every)))
    places = [Dataset.from_dict({"place": list(islice(numbers, len(rows)))}) for rows in loaded]
    mixed = interleave_datasets(places, shares, seed=seed, stopping_strategy="first_exhausted")
    return [every[place] for place in mixed["place"][:]]


def _load_by_datasets(source: str, flag: str, split: str, max_samples: int | None) -> list[Row]:
    """Rows of a folder saved by ``datasets`` or of a data set of the hub."""
    path, name = Path(source).expanduser(), re.fullmatch(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w.-]+))?", source)
    try:
        if path.is_dir():
            saved = load_from_disk(str(path))
            splits = saved if isinstance(saved, DatasetDict) else {split: saved}
        elif name is None or _suffix(path) in READERS:
            raise FileNotFoundError("not a name on the hub")
        else:
            splits = {split: load_dataset(name[1], name[2], split=split)}
        n_rows = len(splits.get(split, ()))
        rows: list[Row] = splits[split].take(min(max_samples or n_rows, n_rows)).to_list() if n_rows else []
    except _UNREADABLE as error:
        what = f"no such file or folder, and split {split!r} of a data set of that name cannot be loaded from the hub"
        remedy = "Check the path, the name, the split and the network."
        if path.is_dir():
            what, remedy = "a folder saved by 'datasets' that cannot be read", "Save it again, strange dates as text."
        raise ValueError(f"{flag} {source}: {what} ({error!r}). {remedy}") from error
    _require_split(split, splits, flag, path)
    return rows


def _files_of_split(folder: Path, flag: str, split: str) -> list[Path]:
    """Data files of one split in ``folder``, else in its subfolder 'data', by name."""
    by_split: dict[str, list[Path]] = {}
    for file in _data_files(folder) or _data_files(folder / "data"):
        by_split.setdefault(_split_of_name(file.name, split), []).append(file)
    if not by_split:
        raise ValueError(
            f"{flag} {folder}: no data file in this folder. Name a .jsonl, .json, .csv or .parquet file, a folder "
            "of them, or a folder saved by 'datasets'."
        )
    _require_split(split, by_split, flag, folder)
    if len({_suffix(file) for file in by_split[split]}) > 1:
        names = ", ".join(file.name for file in by_split[split])
        raise ValueError(f"{flag} {folder}: files of several kinds for split {split!r} ({names}). Name one file.")
    return by_split[split]


def _data_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.glob("*")) if _suffix(file) in READERS and file.name not in FILES_TO_IGNORE]


def _split_of_name(name: str, wanted: str) -> str:
    """The split of which a word is in the name of a file: "validation" of "gsm8k-dev.jsonl"."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if wanted.lower() in words:
        return wanted
    return next((str(split) for split, known in SPLIT_KEYWORDS.items() if words.intersection(known)), "train")


def _require_split(split: str, splits: Iterable[str], flag: str, path: Path) -> None:
    if split not in splits:
        flag_of_split = re.sub("_data(set)?$", "", flag) + "_split"  # --prompt_split, --eval_split, --dataset_split
        raise ValueError(
            f"{flag} {path}: no split {split!r}. Its splits are {', '.join(sorted(splits))}: choose one with "
            f"{flag_of_split}."
        )


def _suffix(path: Path) -> str:
    """The extension of ``path``, ".jsonl" of "rows.jsonl.gz"."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _read_file(path: Path, flag: str) -> Iterator[Row]:
    """Rows of one data file, read on demand; ``ValueError`` names ``flag``, the file and, if there is one, the line."""
    where = f"{flag} {path}"
    if _suffix(path) not in READERS:
        raise ValueError(f"{where}: unknown kind of file. Use .jsonl, .json or .csv (each also with .gz), or .parquet.")
    try:
        yield from READERS[_suffix(path)](path, where)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where}: cannot be read ({error}). Check that the file is whole and readable.") from error


def _lines(path: Path, where: str) -> Iterator[str]:
    """Without a byte order mark."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error}). Save the file as UTF-8.") from error


def _read_json(path: Path, where: str) -> Iterator[Row]:
    """Rows of an array, which only .json may have, or one on each line."""
    texts, array = _lines(path, where), False
    if _suffix(path) == ".json":
        whole = "".join(texts)
        array = whole.lstrip().startswith("[")
        texts = iter([whole] if array else whole.split("\n"))
    for line, text in enumerate(texts, start=1):
        if text.strip():
            value = _parse(text.rstrip(), where, line)
            for number, row in enumerate(value if array else [value], start=1):
                if not isinstance(row, dict):
                    place, kind = f"row {number}" if array else f"line {line}", type(row).__name__
                    raise ValueError(f"{where}, {place}: not an object but {kind}. {JSON_HINT}")
                yield row


def _parse(text: str, where: str, line: int) -> Any:
    """Value of JSON ``text``, which begins in ``line`` of its file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the value of a number may be too long, the nesting too deep
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            line, what = line + error.lineno - 1, f"{error.msg} at column {error.colno}"
        raise ValueError(f"{where}, line {line}: not valid JSON ({what}). {JSON_HINT}") from error


def _read_csv(path: Path, where: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than many documents
    reader = csv.reader(_lines(path, where), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"{where}, line 1: a column occurs twice. Rename one of them.")
        for fields in filter(None, reader):  # without empty lines
            if len(fields) != len(header):
                raise ValueError(
                    f"{where}, line {reader.line_num}: {len(fields)} fields, but the first line names {len(header)} "
                    "columns. Put quotes around texts with commas."
                )
            yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ValueError(f"{where}, line {reader.line_num}: not valid CSV ({error}). Check its quotes.") from error


def _read_parquet(path: Path, where: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches():
                batch.validate(full=True)  # offsets and UTF-8: reading on through damage could crash the process
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # the last for dates after the year 9999
        what = " ".join(str(error).split())
        remedy = "Write it again, dates and times that are out of range as text."
        raise ValueError(f"{where}: cannot be read as Parquet ({what}). {remedy}") from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
"""How to read a file, by its extension."""
