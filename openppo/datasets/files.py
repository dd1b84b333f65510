"""Data files and folders of them, local or at an address of fsspec -> rows in their order.

They are read here, because ``datasets`` changes values (in JSON a text like "2020-01-01" becomes a date, missing keys
become None), passes CSV lines with too few fields and verifies no checksums of Parquet. They are read on every call,
without a cache.
"""

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets.data_files import FILES_TO_IGNORE, SPLIT_KEYWORDS
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from openppo import logger
from openppo.config.fields import mask_credentials

Row = dict[str, Any]
"""One row of data: column name -> value."""

JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."


@dataclass(frozen=True)
class Place:
    """A file or folder: its ``name`` in messages, its ``address``, and the ``path`` on its file system."""

    name: str
    address: str
    path: str
    system: AbstractFileSystem

    @property
    def last_name(self) -> str:
        return PurePosixPath(self.path).name

    def inside(self, name: str) -> "Place":
        """The file or folder of that name in this folder."""
        shown, address, path = (
            f"{text.rstrip('/')}/{name}" for text in (self.name, self.address, self.path)
        )
        return Place(shown, address, path, system=self.system)

    def is_file(self) -> bool:
        return bool(self.system.isfile(self.path))

    def is_dir(self) -> bool:
        return bool(self.system.isdir(self.path))

    def data_files(self) -> list["Place"]:
        """Files in this folder that can be read, by name; none without such a folder."""
        names = [PurePosixPath(path).name for path in self.system.find(self.path, maxdepth=1)]
        files = [self.inside(name) for name in sorted(names) if name not in FILES_TO_IGNORE]
        return [file for file in files if is_data_file(file)]

    def open(self) -> IO[bytes]:
        """The open file."""
        opened: IO[bytes] = self.system.open(self.path, "rb")
        return opened

    @contextmanager
    def naming_errors(self, flag: str) -> Iterator[None]:
        """Turn any error of a remote file system, which has kinds of its own, into a ``ValueError`` with a remedy."""
        try:
            yield
        except (
            Exception
        ) as error:  # of any kind, and raised again: each package behind fsspec has its own
            if isinstance(self.system, LocalFileSystem) or str(error).startswith(flag):
                raise
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = "Check the address, the network and the credentials."
            raise ValueError(f"{flag} {self.name}: cannot be read ({what}). {remedy}") from error


def find_place(source: str, flag: str) -> Place:
    """The place at a path or an address with "://"; ``ValueError`` for an unknown kind or a missing package."""
    if "://" not in source:
        return Place(source, source, str(Path(source).expanduser()), system=LocalFileSystem())
    name, protocol = mask_credentials(source), source.partition("://")[0]
    try:
        system, path = url_to_fs(source)
    except ImportError as error:
        package = str(known_implementations.get(protocol, {}).get("class", protocol)).split(".")[0]
        raise ValueError(
            f"{flag} {name}: reading {protocol}:// needs {package}: pip install {package}."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{flag} {name}: {error}. Use an address of fsspec, such as s3://, gs:// or hf://."
        ) from error
    return Place(name, source, path, system=system)


def files_of_split(folder: Place, flag: str, split: str) -> list[Place]:
    """Data files of one split in ``folder``, else in its subfolder 'data', by name."""
    by_split: dict[str, list[Place]] = {}
    for file in folder.data_files() or folder.inside("data").data_files():
        by_split.setdefault(_split_of_name(file.last_name, split), []).append(file)
    if not by_split:
        raise ValueError(
            f"{flag} {folder.name}: no data file in this folder. Name a .jsonl, .json, .csv or .parquet file, a folder "
            "of them, or a folder saved by 'datasets'."
        )
    require_split(split, by_split, flag, name=folder.name)
    if len({_suffix(file.last_name) for file in by_split[split]}) > 1:
        names = ", ".join(file.last_name for file in by_split[split])
        raise ValueError(
            f"{flag} {folder.name}: files of several kinds for split {split!r} ({names}). Name one file."
        )
    return by_split[split]


def is_data_file(place: Place) -> bool:
    """Whether its name ends as one of a file that can be read."""
    return _suffix(place.last_name) in READERS


def _split_of_name(name: str, wanted: str) -> str:
    """The split of which a word is in the name of a file: "validation" of "gsm8k-dev.jsonl"."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if wanted.lower() in words:
        return wanted
    return next(
        (str(split) for split, known in SPLIT_KEYWORDS.items() if words.intersection(known)),
        "train",
    )


def require_split(split: str, splits: Iterable[str], flag: str, name: str) -> None:
    """``ValueError`` with a remedy if the source of that name lacks ``split``."""
    if split not in splits:
        flag_of_split = (
            re.sub("_data(set)?$", "", flag) + "_split"
        )  # --prompt_split, --eval_split, --dataset_split
        raise ValueError(
            f"{flag} {name}: no split {split!r}. Its splits are {', '.join(sorted(splits))}: choose one with "
            f"{flag_of_split}."
        )


def _suffix(name: str) -> str:
    """The extension of a file, ".jsonl" of "rows.jsonl.gz"."""
    return PurePosixPath(name.lower().removesuffix(".gz")).suffix


def read_file(file: Place, flag: str) -> Iterator[Row]:
    """Rows of one data file, read on demand; ``ValueError`` names ``flag``, the file and, if there is one, the line."""
    where = f"{flag} {file.name}"
    if not is_data_file(file):
        raise ValueError(
            f"{where}: unknown kind of file. Use .jsonl, .json or .csv (each also with .gz), or .parquet."
        )
    try:
        with file.open() as opened:
            is_packed = file.last_name.lower().endswith(".gz")
            unpacked: Any = gzip.GzipFile(fileobj=opened) if is_packed else opened
            yield from READERS[_suffix(file.last_name)](unpacked, where)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{where}: cannot be read ({error}). Check that the file is whole and readable."
        ) from error


def _lines(file: IO[bytes], where: str) -> Iterator[str]:
    """Without a byte order mark."""
    try:
        yield from TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error}). Save the file as UTF-8.") from error


def _read_json(file: IO[bytes], where: str) -> Iterator[Row]:
    """Rows of an array, of an object of columns or with an array "data", or one on each line."""
    whole = "".join(_lines(file, where))
    if whole.lstrip().startswith("["):
        yield from _rows_of([whole], where, array=True)
    elif (rows := _rows_of_object(whole, where)) is not None:
        yield from rows
    else:
        yield from _rows_of(whole.split("\n"), where)


def _rows_of_object(text: str, where: str) -> list[Row] | None:
    """Rows of a file that is one object: of its array "data", or of its columns as pandas writes them; else None."""
    objects = _Objects()
    try:
        value = json.loads(text, object_pairs_hook=objects)
    except (ValueError, RecursionError):  # an object on each line
        return None

    rows = _rows_of_columns(value) if isinstance(value, dict) else None
    data = value.get("data") if isinstance(value, dict) else None
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        rows = data
        logger.info("%s: its rows are those of 'data'", where)
    elif rows is not None:
        logger.info("%s: each of its values is a column, of %d rows", where, len(rows))
    if rows is not None:
        objects.log_repeated(where)
    return rows


def _rows_of_columns(columns: Row) -> list[Row] | None:
    """Rows of columns that are lists of texts and numbers, or objects by row number; None for anything else."""
    values = [column for value in columns.values() if (column := _column(value))]
    lengths = {len(column) for column in values}
    if len(values) < len(columns) or len(lengths) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _column(value: Any) -> list[Any] | None:
    """Values of a column; None for a value of one row, such as a chat."""
    if isinstance(value, dict) and list(value) == [str(number) for number in range(len(value))]:
        return list(value.values())
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return value
    return None


def _read_jsonl(file: IO[bytes], where: str) -> Iterator[Row]:
    return _rows_of(_lines(file, where), where)


def _rows_of(texts: Iterable[str], where: str, array: bool = False) -> Iterator[Row]:
    objects = _Objects()
    try:
        for line, text in enumerate(texts, start=1):
            if text.strip():
                value = _parse(text.rstrip(), where, line, objects=objects)
                for number, row in enumerate(value if array else [value], start=1):
                    if not isinstance(row, dict):
                        place, kind = (
                            f"row {number}" if array else f"line {line}",
                            type(row).__name__,
                        )
                        raise ValueError(f"{where}, {place}: not an object but {kind}. {JSON_HINT}")
                    yield row
    finally:  # also where the first rows are enough
        objects.log_repeated(where)


@dataclass
class _Objects:
    """Makes the objects of a JSON file; counts those in which a key is twice, of which the last value is read."""

    n_repeated: int = 0
    first: str = ""

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = Counter(key for key, _ in pairs)
            self.first = self.first or keys.most_common(1)[0][0]
            self.n_repeated += 1
        return values

    def log_repeated(self, where: str) -> None:
        if self.n_repeated:
            n, first = self.n_repeated, self.first
            logger.warning(
                "%s: %d objects have a key twice, the first %r; the last value is read",
                where,
                n,
                first,
            )


def _parse(text: str, where: str, line: int, objects: _Objects) -> Any:
    """Value of JSON ``text``, which begins in ``line`` of its file."""
    try:
        return json.loads(text, object_pairs_hook=objects)
    except (
        ValueError,
        RecursionError,
    ) as error:  # the value of a number may be too long, the nesting too deep
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            line, what = line + error.lineno - 1, f"{error.msg} at column {error.colno}"
        raise ValueError(f"{where}, line {line}: not valid JSON ({what}). {JSON_HINT}") from error


def _read_csv(file: IO[bytes], where: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than many documents
    lines = _lines(file, where)
    first = next(lines, "")
    separator = next((each for each in ",;\t" if each in first), ",")
    if separator != ",":
        logger.info("%s: columns are separated by %r, as in the first line", where, separator)
    reader = csv.reader(chain([first], lines), delimiter=separator, strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"{where}, line 1: a column occurs twice. Rename one of them.")
        for fields in filter(None, reader):  # without empty lines
            if len(fields) != len(header):
                raise ValueError(
                    f"{where}, line {reader.line_num}: {len(fields)} fields, but the first line names {len(header)} "
                    f"columns. Put quotes around texts with {separator!r}."
                )
            yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{where}, line {reader.line_num}: not valid CSV ({error}). Check its quotes."
        ) from error


def _read_parquet(file: IO[bytes], where: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as table:
            for batch in table.iter_batches():
                batch.validate(
                    full=True
                )  # offsets and UTF-8: reading on through damage could crash the process
                yield from map(without_added_keys, batch.to_pylist())
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        OverflowError,
    ) as error:  # the last for dates after the year 9999
        what = " ".join(str(error).split())
        remedy = "Write it again, dates and times that are out of range as text."
        raise ValueError(f"{where}: cannot be read as Parquet ({what}). {remedy}") from error


_OPEN_OBJECTS = ("function", "arguments", "parameters", "properties")
"""Objects of tool calls and schemas whose keys differ from one to the next."""


def without_added_keys(row: Row) -> Row:
    """A row of Arrow without the null keys that it adds to objects of tools in the columns: those of other rows.

    ``{"x": 0, "city": None}`` among arguments, beside a row with a city, is ``{"x": 0}``.
    """
    return {name: _without_nulls(value, is_open=False) for name, value in row.items()}


def _without_nulls(value: Any, is_open: bool) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, is_open) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: item for name, item in value.items() if not (is_open and item is None)}
    return {
        name: _without_nulls(item, is_open or name in _OPEN_OBJECTS) for name, item in kept.items()
    }


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
"""How to read a file, by its extension."""
