"""Output files at places that the user names: a command replaces only what it wrote before."""

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
    """Return the file that ``flag`` names, with its folder made; ``ValueError`` if something would be lost.

    A file may be replaced if ``is_ours`` is true for its beginning and it is none of ``inputs``, pairs of a flag and a
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
        is_device_or_pipe = file.exists() and not file.is_file()
        if is_device_or_pipe:  # which may wait for its reader
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
    """Yield a new file that takes the place of ``file``, whole, at the end of the block.

    An error leaves ``file`` as it was. A link stays, and its target is replaced. A pipe or device is written directly.
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
    """True if ``file`` is ``source``, or lies in that folder."""
    return source.exists() and file.resolve().is_relative_to(source.resolve())


def _may_replace(file: Path, is_ours: Callable[[bytes], bool]) -> bool:
    with file.open("rb") as content:
        beginning = content.read(_BEGINNING)
    return not beginning or is_ours(beginning)
