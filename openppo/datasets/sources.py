"""Data sources named on the command line -> rows in their order.

``datasets`` reads the hub and saved folders. Files are read here, because it changes values (in JSON a text like
"2020-01-01" becomes a date, missing keys become None), passes CSV lines with too few fields and verifies no checksums
of Parquet. Local files are read on every call, without a cache.
"""

import csv
import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, interleave_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from openppo.config import RowsConfig, parse_probs
from openppo.user_code import leaving_no_trace, load_callable

logger = logging.getLogger(__name__)

Row = dict[str, Any]
"""One row of data: column name -> value."""
PlacedRow = tuple[Row, str]
"""A row and its place in the file, "line 3" or "row 3", both from 1."""

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
JSON_HINT = "Put one JSON object on each line, or use a .json file with an array of objects."
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, OverflowError, DatasetsError, pa.ArrowException)
"""What ``datasets`` raises for damaged files and for dates that Python cannot hold."""


@dataclass(frozen=True)
class SourceRow:
    """A row, the name of its source, its number there (from 1), and its place in the file, if known: "line 3"."""

    row: Row
    source: str
    number: int
    place: str = ""


ShowRows = Callable[[Sequence[SourceRow]], Iterable[SourceRow]]
"""Iterates over rows with a progress bar: tokenizing many takes minutes."""


def number_rows(rows: Iterable[Row], source: str = "") -> list[SourceRow]:
    """``rows`` of one source, in order."""
    return [SourceRow(row, source, number) for number, row in enumerate(rows, start=1)]


def load_rows(source: str, *, flag: str, split: str, max_samples: int | None) -> list[SourceRow]:
    """The first ``max_samples`` rows of ``source``, in order.

    ``source`` is a JSONL, JSON, CSV or Parquet file, a folder saved by ``datasets``, a folder of such files, or
    else a hub name, ``owner/name`` or ``owner/name@configuration``. ``split`` chooses among the splits of a folder or
    a hub data set; a single file has none. Values of CSV files are strings. Raises ``ValueError`` naming ``flag``, the
    source and the remedy.
    """
    path = Path(source).expanduser()
    placed: Iterable[PlacedRow]
    if path.is_file():
        placed = _read_file(path, flag)
    elif path.is_dir():
        placed = _load_folder(path, flag, split, max_samples)
    else:
        placed = ((row, "") for row in _load_from_hub(source, flag, split, max_samples))
    rows = [SourceRow(row, source, n, place) for n, (row, place) in enumerate(islice(placed, max_samples), start=1)]
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
    make = None if options.dataset_class is None else load_callable(options.dataset_class, "--dataset_class")
    loaded = []
    for source, _ in pairs:
        if make is None:
            loaded.append(load_rows(source, flag=flag, split=split, max_samples=limit))
        else:
            where = f"--dataset_class {options.dataset_class}, called for {flag} {source},"
            with leaving_no_trace(where):
                loaded.append(number_rows(_rows_made(make(source), where, limit), source))
    shares = [share for _, share in pairs if share is not None]
    rows = _interleave(loaded, shares, seed) if shares else list(chain.from_iterable(loaded))
    n_different = len({hash(repr(row.row)) for row in rows})  # hashes, so that no second copy is in memory
    if n_different < len(rows):
        logger.info("%s: %d of %d rows are copies of others; they are kept", flag, len(rows) - n_different, len(rows))
    return rows


def _interleave(loaded: Sequence[Sequence[SourceRow]], shares: list[float], seed: int) -> list[SourceRow]:
    places = [Dataset.from_dict({"source": [i] * len(rows), "row": range(len(rows))}) for i, rows in enumerate(loaded)]
    mixed = interleave_datasets(places, shares, seed=seed, stopping_strategy="first_exhausted")
    return [loaded[source][row] for source, row in zip(mixed["source"][:], mixed["row"][:], strict=True)]


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
    """Rows of the user's loader."""
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
    """Rows of a folder saved by ``datasets``, or of the files of one split."""
    if not ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        for file in _files_of_split(path, flag, split):
            place = ""
            for row, place in _read_file(file, flag):
                yield row, f"{file.name}, {place}"
            if not place:
                logger.warning("%s %s: empty, it has no rows", flag, file)
        return
    try:
        saved = load_from_disk(str(path))
        splits = saved if isinstance(saved, DatasetDict) else {split: saved}
        rows = _head(splits[split], max_samples) if split in splits else []
    except _UNREADABLE as error:
        raise ValueError(
            f"{flag} {path}: a folder saved by 'datasets' that cannot be read ({error!r}). Save it again, dates and "
            "times that are out of range as text."
        ) from error
    _require_split(split, sorted(splits), flag, path)
    yield from ((row, "") for row in rows)


def _files_of_split(folder: Path, flag: str, split: str) -> list[Path]:
    """Data files of one split in ``folder``, else in its subfolder 'data', by name."""
    for place in (folder, folder / "data"):
        by_split: dict[str, list[Path]] = {}
        for file in sorted(place.glob("*")):
            if file.is_file() and _suffix(file) and file.name not in METADATA_FILES:
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
    if len({_suffix(file) for file in files}) > 1:
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
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w.-]+)?", source) or _suffix(Path(source)):
        raise ValueError(f"{missing} (it is not a hub name). Check the path.")
    name, _, configuration = source.partition("@")
    try:
        return _head(load_dataset(name, configuration or None, split=split), max_samples)
    except (ValueError, RuntimeError, OverflowError) as error:  # it exists, without this split or with other data
        raise ValueError(f"{flag} {source}: split {split!r} could not be loaded from the hub: {error}") from error
    except (OSError, DatasetsError) as error:
        raise ValueError(
            f"{missing} ({type(error).__name__}: {error}). Check the path, the name and the network."
        ) from error


def _head(rows: Dataset, max_samples: int | None) -> list[Row]:
    head: list[Row] = rows.take(min(max_samples, len(rows)) if max_samples is not None else len(rows)).to_list()
    return head


def _read_file(path: Path, flag: str) -> Iterator[PlacedRow]:
    """Rows of one data file, read on demand.

    Raises ``ValueError`` naming ``flag``, the file and, where there is one, the line.
    """
    suffix, where = _suffix(path), f"{flag} {path}"
    if suffix is None:
        raise ValueError(f"{where}: unknown kind of file. Use .jsonl, .json or .csv (each also with .gz), or .parquet.")
    try:
        yield from READERS[suffix](path, where)
    except UnicodeDecodeError as error:
        what = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
        raise ValueError(
            f"{where}, line {_first_line_not_utf8(path)}: not UTF-8 text ({what}). Save the file as UTF-8."
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{where}: cannot be read ({error}). Check that the file is whole and readable.") from error


def _suffix(path: Path) -> str | None:
    """The extension in ``READERS`` that ``path`` ends with."""
    return next((suffix for suffix in READERS if path.name.lower().endswith(suffix)), None)


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _first_line_not_utf8(path: Path) -> int:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        return next((n for n, line in enumerate(file, start=1) if line != line.decode(errors="ignore").encode()), 1)


def _read_json_lines(path: Path, where: str) -> Iterator[PlacedRow]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"line {number}"
                cut = "" if line.endswith("\n") else "The file ends in this line: it may be cut off. "
                yield _as_object(_parse(line.rstrip(), f"{where}, {place}", cut), f"{where}, {place}"), place


def _read_json(path: Path, where: str) -> Iterator[PlacedRow]:
    """Rows of an array, or one on each line."""
    with _open_text(path) as file:
        is_array = next((line.lstrip() for line in file if line.strip()), "").startswith("[")
        file.seek(0)
        text = file.read() if is_array else ""
    if not is_array:
        yield from _read_json_lines(path, where)
        return
    for number, row in enumerate(_parse(text, where), start=1):
        yield _as_object(row, f"{where}, row {number}"), f"row {number}"


def _parse(text: str, where: str, remark: str = "") -> Any:
    """Value of JSON ``text``; ``ValueError`` for malformed or too deep JSON, and a column that occurs twice."""
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
        raise ValueError(f"{_repeated([name for name, _ in pairs])!r} occurs twice in an object")
    return row


def _repeated(names: Sequence[str]) -> str | None:
    """The first name that occurs twice."""
    return next((name for name in names if names.count(name) > 1), None)


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
            if (repeated := _repeated(header)) is not None:
                raise ValueError(f"{where}, line 1: column {repeated!r} occurs twice. Rename one of them.")
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
            if (repeated := _repeated(file.schema_arrow.names)) is not None:
                raise ValueError(f"{where}: column {repeated!r} occurs twice. Rename one of them.")
            for batch in file.iter_batches():
                batch.validate(full=True)  # offsets and UTF-8: reading on through damage could crash the process
                for row in _python_rows(batch, f"{where}, from row {number} on"):
                    yield row, f"row {number}"
                    number += 1
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the file itself, not its content
        what = " ".join(str(error).split())
        raise ValueError(
            f"{where}, from row {number} on: cannot be read as Parquet ({what}). Write it again."
        ) from error


def _python_rows(batch: pa.RecordBatch, where: str) -> list[Row]:
    """Rows of a batch; ``ValueError`` naming the column with a value that Python cannot hold."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns.append(column.to_pylist())
        except (OverflowError, ValueError) as error:  # dates after the year 9999, unknown time zones
            what = f"column {name!r} holds a value of type {column.type} that cannot be read ({error})"
            raise ValueError(f"{where}: {what}. Leave the column out, or write it as text.") from error
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


READERS: dict[str, Callable[[Path, str], Iterator[PlacedRow]]] = {
    **dict.fromkeys((".jsonl", ".jsonl.gz"), _read_json_lines),
    **dict.fromkeys((".json", ".json.gz"), _read_json),
    **dict.fromkeys((".csv", ".csv.gz"), _read_csv),
    ".parquet": _read_parquet,
}
"""How to read a file, by the end of its name."""
