"""Data files -> rows: JSON, JSONL, CSV and Parquet, read in order, offline and without a cache."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
"""One row of data: column name -> value."""

JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."


def read_file(path: Path, flag: str) -> Iterator[Row]:
    """The rows of one data file, in order, read as they are asked for.

    Raises ``ValueError`` naming ``flag``, the file and, where there is one, the line: unknown extension, malformed
    content, text that is not UTF-8, a damaged archive, a row that is not an object.
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
        raise ValueError(f"{where}: not UTF-8 text ({error}). Save the file as UTF-8.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where}: cannot be read ({error}). Check that the file is whole and readable.") from error


def data_suffix(path: Path) -> str | None:
    """The extension that tells how to read ``path``, or ``None`` when it is not one of ours."""
    return next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _read_json_lines(path: Path, where: str) -> Iterator[Row]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}, line {number}: not valid JSON ({error.msg} at column {error.colno}). {JSON_HINT}"
                ) from error
            yield _as_object(row, f"{where}, line {number}")


def _read_json(path: Path, where: str) -> Iterator[Row]:
    with _open_text(path) as file:
        start = next((line.lstrip() for line in file if line.strip()), "")
    if not start.startswith("["):
        yield from _read_json_lines(path, where)
        return
    with _open_text(path) as file:
        try:
            rows = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno}). {JSON_HINT}"
            ) from error
    for number, row in enumerate(rows, start=1):
        yield _as_object(row, f"{where}, row {number}")


def _as_object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object but {type(row).__name__}. {JSON_HINT}")
    return row


def _read_csv(path: Path, where: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than many documents
    with _open_text(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                raise ValueError(f"{where}, line 1: column {repeated[0]!r} occurs twice. Rename one of them.")
            for fields in reader:
                if len(fields) == len(header):
                    yield dict(zip(header, fields, strict=True))
                elif fields:
                    raise ValueError(
                        f"{where}, line {reader.line_num}: {len(fields)} fields, but the first line names "
                        f"{len(header)} columns. Put quotes around texts with commas."
                    )
        except csv.Error as error:
            raise ValueError(f"{where}, line {reader.line_num}: not valid CSV ({error}). Check its quotes.") from error


def _read_parquet(path: Path, where: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
    except pa.ArrowException as error:
        raise ValueError(f"{where}: not a whole Parquet file ({error}). Write it again.") from error


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
"""How to read a file, by the end of its name."""
