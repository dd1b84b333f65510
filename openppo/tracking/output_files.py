"""Files that commands write where their user says: only what they wrote before is replaced."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile, mkstemp

from openppo.weight_files import set_usual_mode

_BEGINNING = 4096
"""Bytes of a file by which it is known."""


def check_output_file(
    path: str,
    flag: str,
    *,
    is_ours: Callable[[bytes], bool],
    inputs: Iterable[tuple[str, str]] = (),
) -> Path:
    """The file that ``flag`` names, its folder made; ``ValueError`` if writing there would lose something.

    A file is replaced if ``is_ours`` says so of its beginning, and if it is none of ``inputs``, pairs of a flag and a
    path, nor in a folder of them.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file in it.")
    for input_flag, name in inputs:
        if _is_of(file, Path(name).expanduser()):
            raise ValueError(f"{flag} {path} is read by {input_flag} {name}: name another file.")
    try:
        if file.is_file() and not _may_replace(file, is_ours):
            raise ValueError(
                f"{flag} {path} holds what this command has not written: name another file, or remove it."
            )
        if (
            file.exists() and not file.is_file()
        ):  # a device or a pipe, which may wait for its reader
            return file
        folder = file.resolve().parent
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: cannot be written ({error}); choose another folder."
        ) from error
    return file


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A new file beside ``file`` that takes its place, whole, at the end of the block; an error leaves ``file`` alone.

    A link stays, and its target is replaced. What is no regular file, such as a pipe, is written straight.
    """
    if file.exists() and not file.is_file():
        yield file
        return

    target = file.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
    descriptor, name = mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(descriptor)
    unfinished = Path(name)
    try:
        yield unfinished
        if target.exists():
            shutil.copymode(target, unfinished)
        else:
            set_usual_mode([unfinished])
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_of(file: Path, source: Path) -> bool:
    """Test for a file that is ``source``, or in that folder."""
    return source.exists() and file.resolve().is_relative_to(source.resolve())


def _may_replace(file: Path, is_ours: Callable[[bytes], bool]) -> bool:
    with file.open("rb") as content:
        beginning = content.read(_BEGINNING)
    return not beginning or is_ours(beginning)
