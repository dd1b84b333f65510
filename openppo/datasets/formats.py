"""Data files -> rows and their places: JSON, JSONL, CSV and Parquet, read in order, offline and without a cache."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
"""One row of data: column name -> value."""

JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."


PlacedRow = tuple[Row, str]
"""A row and its place in the file, "line 3" or "row 3", both from 1."""


def read_file(path: Path, flag: str) -> Iterator[PlacedRow]:
    """The rows of one data file, in order, read as they are asked for.

    Raises ``ValueError`` naming ``flag``, the file and, where there is one, the line: unknown extension, malformed
    content, a column that occurs twice, text that is not UTF-8, a damaged archive, a row that is not an object.
    """
    suffix = data_suffix(path)
    if suffix is None:
        raise ValueError(
            f"{flag} {path}: unknown kind of file. Use .jsonl, .json or .csv (each also with .gz), or .parquet."
        )
    where = f"{flag} {path}"
    try:
        yield from READERS[suffix](path, where)
    except UnicodeDecodeError as error:
        place = _first_line_that_is_no_text(path)
        what = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
        raise ValueError(f"{where}, line {place}: not UTF-8 text ({what}). Save the file as UTF-8.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where}: cannot be read ({error}). Check that the file is whole and readable.") from error


def data_suffix(path: Path) -> str | None:
    """The extension that tells how to read ``path``, or ``None`` when it is not one of ours."""
    return next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _first_line_that_is_no_text(path: Path) -> int:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        return next((n for n, line in enumerate(file, start=1) if line != line.decode(errors="ignore").encode()), 1)


def _read_json_lines(path: Path, where: str) -> Iterator[PlacedRow]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                cut = "" if line.endswith("\n") else "The file ends in this line: it may be cut off. "
                place = f"line {number}"
                row = _parse(line.rstrip(), f"{where}, {place}", cut)
                yield _as_object(row, f"{where}, {place}"), place


def _read_json(path: Path, where: str) -> Iterator[PlacedRow]:
    with _open_text(path) as file:
        start = next((line.lstrip() for line in file if line.strip()), "")
    if not start.startswith("["):
        yield from _read_json_lines(path, where)
        return
    with _open_text(path) as file:
        text = file.read()
    for number, row in enumerate(_parse(text, where), start=1):
        yield _as_object(row, f"{where}, row {number}"), f"row {number}"


def _parse(text: str, where: str, remark: str = "") -> Any:
    """What JSON ``text`` holds; ``ValueError`` if it is none, nests too deep, or names a column twice."""
    try:
        return json.loads(text, object_pairs_hook=_as_row)
    except (ValueError, RecursionError) as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at column {error.colno}"
            where += f", line {error.lineno}" if ", line " not in where else ""
        raise ValueError(f"{where}: not valid JSON ({what}). {remark}{JSON_HINT}") from error


def _as_row(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in an object")
    return row


def _as_object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object but {type(row).__name__}. {JSON_HINT}")
    return row


def _read_csv(path: Path, where: str) -> Iterator[PlacedRow]:
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than many documents
    with _open_text(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise ValueError(f"{where}, line 1: column {repeated[0]!r} occurs twice. Rename one of them.")
            first = reader.line_num + 1  # line of the row: it may have several
            for fields in reader:
                if len(fields) == len(header):
                    yield dict(zip(header, fields, strict=True)), f"line {first}"
                elif fields:
                    raise ValueError(
                        f"{where}, line {first}: {len(fields)} fields, but the first line names "
                        f"{len(header)} columns. Put quotes around texts with commas."
                    )
                first = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{where}, line {reader.line_num}: not valid CSV ({error}). Check its quotes.") from error


def _read_parquet(path: Path, where: str) -> Iterator[PlacedRow]:
    number = 1
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if repeated := [name for name, n in Counter(names).items() if n > 1]:
                raise ValueError(f"{where}: column {repeated[0]!r} occurs twice. Rename one of them.")
            for batch in file.iter_batches():
                batch.validate(full=True)  # offsets and UTF-8: reading on through damage could crash the process
                for row in _python_rows(batch, f"{where}, from row {number} on"):
                    yield row, f"row {number}"
                    number += 1
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # not of pyarrow's: the file cannot be read at all
        what = " ".join(str(error).split())
        raise ValueError(
            f"{where}, from row {number} on: not a whole Parquet file ({what}). Write it again."
        ) from error


def _python_rows(batch: pa.RecordBatch, where: str) -> list[Row]:
    """The rows of a batch; ``ValueError`` naming the column where a value has no form in Python."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError) as error:  # dates after the year 9999, time zones that are not known
            raise ValueError(
                f"{where}: column {name!r} holds a value of type {column.type} that cannot be read ({error}). Leave "
                "the column out, or write it as text."
            ) from error
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


READERS: dict[str, Callable[[Path, str], Iterator[PlacedRow]]] = {
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
"""How to read a file, by the end of its name."""
