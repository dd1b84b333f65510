"""Data files and folders of them, local or at an address of fsspec -> rows in their order.

Files are read on every call, without a cache.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from datasets.data_files import FILES_TO_IGNORE, SPLIT_KEYWORDS
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from openppo.config.fields import mask_credentials
from openppo.datasets.file_formats import READERS, Row


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
