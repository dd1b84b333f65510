"""Rows of JSON, CSV and Parquet files.

They are read here, because ``datasets`` changes values (in JSON a text like "2020-01-01" becomes a date, missing keys
become None), passes CSV lines with too few fields and verifies no checksums of Parquet.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from openppo import logger

Row = dict[str, Any]
"""One row of data: column name -> value."""

JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."


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
