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
        """Name of the file or folder, without its parents."""
        return PurePosixPath(self.path).name

    def inside(self, name: str) -> "Place":
        """The file or folder ``name`` in this folder."""
        return Place(
            f"{self.name.rstrip('/')}/{name}",
            f"{self.address.rstrip('/')}/{name}",
            f"{self.path.rstrip('/')}/{name}",
            system=self.system,
        )

    def is_file(self) -> bool:
        """True for a file that exists."""
        return bool(self.system.isfile(self.path))

    def is_dir(self) -> bool:
        """True for a folder that exists."""
        return bool(self.system.isdir(self.path))

    def data_files(self) -> list["Place"]:
        """List the files in this folder that can be read, by name; none if the folder is missing."""
        names = [PurePosixPath(path).name for path in self.system.find(self.path, maxdepth=1)]
        files = [self.inside(name) for name in sorted(names) if name not in FILES_TO_IGNORE]
        return [file for file in files if is_data_file(file)]

    def open(self) -> IO[bytes]:
        """Open the file for reading."""
        opened: IO[bytes] = self.system.open(self.path, "rb")
        return opened

    @contextmanager
    def naming_errors(self, flag: str) -> Iterator[None]:
        """Turn any error of a remote file system into a ``ValueError`` with a remedy."""
        try:
            yield
        # Each package behind fsspec has errors of its own; all are raised again.
        except Exception as error:
            if isinstance(self.system, LocalFileSystem) or str(error).startswith(flag):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            remedy = "Check the address, the network and the credentials."
            raise ValueError(f"{flag} {self.name}: cannot be read ({reason}). {remedy}") from error


def find_place(source: str, flag: str) -> Place:
    """Find the place at a path or an address with "://".

    ``ValueError`` for an unknown kind of address or a missing package.
    """
    if "://" not in source:
        return Place(source, source, str(Path(source).expanduser()), system=LocalFileSystem())

    name = mask_credentials(source)
    protocol = source.partition("://")[0]
    try:
        system, path = url_to_fs(source)
    except ImportError as error:
        implementation = known_implementations.get(protocol, {}).get("class", protocol)
        package = str(implementation).split(".")[0]
        raise ValueError(
            f"{flag} {name}: reading {protocol}:// needs {package}: pip install {package}."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{flag} {name}: {error}. Use an address of fsspec, such as s3://, gs:// or hf://."
        ) from error
    return Place(name, source, path, system=system)


def files_of_split(folder: Place, flag: str, split: str) -> list[Place]:
    """List the data files of one split in ``folder``, else in its subfolder 'data', by name."""
    by_split: dict[str, list[Place]] = {}
    for file in folder.data_files() or folder.inside("data").data_files():
        split_of_file = _split_of_name(file.last_name, split)
        by_split.setdefault(split_of_file, []).append(file)

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
    """True if the name has the extension of a file that can be read."""
    return _suffix(place.last_name) in READERS


def _split_of_name(name: str, wanted: str) -> str:
    """Split named by a word in the name of a file; "train" without one.

    >>> _split_of_name("gsm8k-dev.jsonl", "test")
    'validation'
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if wanted.lower() in words:
        return wanted
    for split, keywords in SPLIT_KEYWORDS.items():
        if words.intersection(keywords):
            return str(split)
    return "train"


def require_split(split: str, splits: Iterable[str], flag: str, name: str) -> None:
    """Raise ``ValueError`` with a remedy if the source of that name lacks ``split``."""
    if split not in splits:
        # Such as --prompt_split, --eval_split and --dataset_split.
        flag_of_split = re.sub("_data(set)?$", "", flag) + "_split"
        raise ValueError(
            f"{flag} {name}: no split {split!r}. Its splits are {', '.join(sorted(splits))}: choose one with "
            f"{flag_of_split}."
        )


def _suffix(name: str) -> str:
    """Extension of a file without that of its compression.

    >>> _suffix("rows.jsonl.gz")
    '.jsonl'
    """
    return PurePosixPath(name.lower().removesuffix(".gz")).suffix


def read_file(file: Place, flag: str) -> Iterator[Row]:
    """Read the rows of one data file on demand.

    A ``ValueError`` names ``flag``, the file and, if there is one, the line.
    """
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
    """Read lines of text without a byte order mark."""
    try:
        yield from TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error}). Save the file as UTF-8.") from error


def _read_json(file: IO[bytes], where: str) -> Iterator[Row]:
    """Read rows of an array or of an object of columns, or one row on each line."""
    whole = "".join(_lines(file, where))
    if whole.lstrip().startswith("["):
        yield from _rows_of([whole], where, array=True)
        return

    rows = _rows_of_object(whole, where)
    if rows is None:
        yield from _rows_of(whole.split("\n"), where)
    else:
        yield from rows


def _rows_of_object(text: str, where: str) -> list[Row] | None:
    """Read rows of a file that is one object; None for any other file.

    They are its array "data", or its columns as pandas writes them.
    """
    objects = _Objects()
    try:
        value = json.loads(text, object_pairs_hook=objects)
    except (ValueError, RecursionError):  # an object on each line
        return None

    if not isinstance(value, dict):
        return None

    rows = _rows_of_columns(value)
    data = value.get("data")
    if isinstance(data, list) and data and all(isinstance(row, dict) for row in data):
        rows = data
        logger.info("%s: its rows are those of 'data'", where)
    elif rows is not None:
        logger.info("%s: each of its values is a column, of %d rows", where, len(rows))
    if rows is not None:
        objects.log_repeated(where)
    return rows


def _rows_of_columns(columns: Row) -> list[Row] | None:
    """Read columns that are lists of texts and numbers, or objects by row number; None for anything else."""
    columns_of_values = []
    for value in columns.values():
        values = _column(value)
        if not values:
            return None
        columns_of_values.append(values)
    if len({len(values) for values in columns_of_values}) != 1:
        return None

    rows = zip(*columns_of_values, strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


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
            if not text.strip():
                continue
            value = _parse(text.rstrip(), where, line, objects=objects)
            rows = value if array else [value]
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, dict):
                    place = f"row {number}" if array else f"line {line}"
                    raise ValueError(
                        f"{where}, {place}: not an object but {type(row).__name__}. {JSON_HINT}"
                    )
                yield row
    finally:
        # The reader may stop after the first rows.
        objects.log_repeated(where)


@dataclass
class _Objects:
    """Maker of the objects of a JSON file; counts those with a key twice, whose last value is read."""

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
        """Warn of keys that were twice in an object."""
        if self.n_repeated:
            logger.warning(
                "%s: %d objects have a key twice, the first %r; the last value is read",
                where,
                self.n_repeated,
                self.first,
            )


def _parse(text: str, where: str, line: int, objects: _Objects) -> Any:
    """Read JSON ``text``, which begins in ``line`` of its file."""
    try:
        return json.loads(text, object_pairs_hook=objects)
    # Besides wrong syntax, a number may be too long and the nesting too deep.
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            line += error.lineno - 1
            problem = f"{error.msg} at column {error.colno}"
        raise ValueError(
            f"{where}, line {line}: not valid JSON ({problem}). {JSON_HINT}"
        ) from error


def _read_csv(file: IO[bytes], where: str) -> Iterator[Row]:
    # The default, 128 KiB, is shorter than many documents.
    csv.field_size_limit(2**31 - 1)

    lines = _lines(file, where)
    first = next(lines, "")
    separators = [separator for separator in ",;\t" if separator in first]
    separator = separators[0] if separators else ","
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
                # Checks offsets and UTF-8: reading damaged ones could crash the process.
                batch.validate(full=True)
                yield from map(without_added_keys, batch.to_pylist())
    # Dates after the year 9999 raise OverflowError.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        problem = " ".join(str(error).split())
        remedy = "Write it again, dates and times that are out of range as text."
        raise ValueError(f"{where}: cannot be read as Parquet ({problem}). {remedy}") from error


_OPEN_OBJECTS = ("function", "arguments", "parameters", "properties")
"""Objects of tool calls and schemas whose keys differ from one to the next."""


def without_added_keys(row: Row) -> Row:
    """Remove null keys that Arrow adds to objects of tools in a row, since another row has them.

    >>> without_added_keys({"call": {"arguments": {"x": 0, "city": None}}})
    {'call': {'arguments': {'x': 0}}}
    """
    return {name: _without_nulls(value, is_open=False) for name, value in row.items()}


def _without_nulls(value: Any, is_open: bool) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item, is_open) for item in value]
    if not isinstance(value, dict):
        return value

    cleaned = {}
    for name, item in value.items():
        if item is not None or not is_open:
            cleaned[name] = _without_nulls(item, is_open or name in _OPEN_OBJECTS)
    return cleaned


READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
"""Readers of files, by extension."""
