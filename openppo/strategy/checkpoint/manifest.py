"""``manifest.json`` of a checkpoint: size and SHA-256 of each file, its step, and the save that wrote it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MODEL = "model"
"""The folder of ``--save_hf_ckpt`` in a checkpoint. Resuming never reads it, so what becomes of it damages nothing."""
_FORMAT = 2


class UnreadableError(Exception):
    """A checkpoint that may be whole cannot be read."""


def write_manifest(folder: Path, step: int, save_id: str, files: Mapping[str, Any]) -> None:
    """Write it to ``folder``; ``files`` has what ``describe`` says of each."""
    content = {"format": _FORMAT, "step": step, "save": save_id, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1))


def describe(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, read back and on the disk for good."""
    flush(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def fault(path: Path, place: int, n_places: int) -> str | None:
    """What damage there is to one of ``n_places`` shares of a checkpoint's files.

    ``UnreadableError`` where it cannot be looked at: another format, no permission, a network disk that is silent.
    """
    try:
        manifest = _read(path)
        names = [name for name in sorted(manifest["files"]) if Path(name).parts[0] != MODEL]
        for name in names[place::n_places]:
            file, wanted = path / name, manifest["files"][name]
            if not file.is_file() or file.stat().st_size != wanted["bytes"]:
                return f"{name} is missing or cut"
            if _sha256(file) != wanted["sha256"]:
                return f"{name} has another checksum"
    except OSError as error:
        _refuse_unless_damage(error)
        return f"{MANIFEST}: {error!r}" if MANIFEST in str(error) else repr(error)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"{MANIFEST}: {error!r}"
    return None


def check_readable(path: Path) -> None:
    """Raise ``UnreadableError`` as ``fault`` does, after a look at the manifest alone."""
    try:
        _read(path)
    except OSError as error:
        _refuse_unless_damage(error)
    except ValueError:
        pass  # damaged


def _read(path: Path) -> Any:
    manifest = json.loads((path / MANIFEST).read_text())
    written = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(written, int) and written != _FORMAT:
        raise UnreadableError(
            f"format {written} is of another version of OpenPPO; this one reads {_FORMAT}. Go on with that version."
        )
    return manifest


def _refuse_unless_damage(error: OSError) -> None:
    """What is not there, or on a bad sector, is damaged; whatever else may be readable later, or by another user."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or error.errno == errno.EIO:
        return
    raise UnreadableError(
        f"cannot be read ({error}). Start as the user who wrote it and with its disk in place, or give another "
        "--ckpt_path."
    ) from error


def save_id(path: Path) -> str | None:
    """Of the save that wrote a checkpoint, the same on all hosts; None where nothing readable is."""
    try:
        saved = json.loads((path / MANIFEST).read_text())["save"]
        return saved if isinstance(saved, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
