"""Folder of checkpoints, each of them complete from the moment it appears.

``step_00000012/`` is written as ``.step_00000012.partial``, checked for a full disk on all ranks, and renamed.
``manifest.json`` in it has the step, and the size and SHA-256 of each file; ``latest`` links to the newest.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import filelock
from safetensors import SafetensorError

from openppo import logger
from openppo.strategy.comm import collective
from openppo.types import Comm

T = TypeVar("T")

MANIFEST = "manifest.json"
MODEL = "model"
"""Folder of ``--save_hf_ckpt`` in a checkpoint: a resume never reads it, so no change to it is damage."""
_FORMAT = 6


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones are unchanged."""


class CheckpointFolder:
    """Checkpoints in ``folder``, which all ranks see; they call every method together.

    Rank 0 creates, renames and removes checkpoints, and locks the folder for this run. ``ValueError`` naming ``flag``
    if the folder cannot be written, another run writes there, or a host does not share it.
    """

    def __init__(self, folder: Path, comm: Comm, keep: int, flag: str = "--ckpt_path") -> None:
        self.folder = folder
        self.comm = comm
        self.keep = keep
        self.flag = flag
        self.is_main = comm.rank == 0

        # One lock for all folders of this path in a process, since a process may build a run twice.
        self._lock = filelock.FileLock(
            folder / ".lock", timeout=0, thread_local=False, is_singleton=True
        )
        collective(comm, self._take_folder if self.is_main else lambda: None)
        collective(comm, self._check_shared)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call ``write`` on every rank with a folder that then becomes the checkpoint of ``step``.

        ``write`` may call collectives only where all ranks raise alike. Raises ``CheckpointError`` on all ranks when
        one of them cannot write; the partial checkpoint is removed and older checkpoints stay.
        """
        partial = self.folder / f".step_{step:08d}.partial"
        try:
            self._on_main(lambda: self._begin(partial))
            self._write(lambda: write(partial))
            self._write_manifest(partial, step)
            self._on_main(lambda: self._publish(partial, "latest", self.keep))
        except CheckpointError:
            if self.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.folder / f"step_{step:08d}"

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, None if there is none; set damaged newer ones aside.

        ``ValueError`` if all are damaged, or one cannot be read now (another format, no permission). In these cases all
        stay as they are, since perhaps only a disk is missing.
        """
        damaged: dict[Path, str] = {}
        checkpoints = self.comm.all_gather_object(of_steps(self.folder))[0]
        for path in reversed(checkpoints):
            damage = self._damage(path)
            if damage is None:
                self._set_damaged_aside(damaged, path)
                return path
            damaged[path] = damage

        if damaged:
            newest = next(iter(damaged.values()))
            raise ValueError(
                f"{self.flag} {self.folder}: all checkpoints there are damaged (the newest: {newest}). If a "
                "disk is missing, start again with it. To begin anew, start without --load_checkpoint, which keeps "
                "them in a folder of their own, or with another --ckpt_path."
            )
        return None

    def set_aside(self) -> None:
        """Move an earlier run's checkpoints and best model to a folder next to this one; other files stay.

        ``CheckpointError`` as in ``save``.
        """
        earlier = (of_steps(self.folder), of_steps(self.folder, "best_step"))
        checkpoints, best_models = self.comm.all_gather_object(earlier)[0]
        if not checkpoints and not best_models:
            return
        aside = _free_name(self.folder)

        def move() -> None:
            links = [self.folder / "latest", self.folder / "best"]
            links = [link for link in links if link.is_symlink()]
            aside.mkdir()
            damaged = self.folder.glob("*.damaged.*")
            for path in (*checkpoints, *best_models, *damaged, *links):
                shutil.move(path, aside)  # to another disk, where the folder is a mount point

        self._on_main(move)
        hint = "; --load_checkpoint would have resumed from them" if checkpoints else ""
        logger.warning(
            "checkpoints or the best model of an earlier run are kept in %s%s", aside, hint
        )

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        """Write a model to ``best_step_...``, link ``best`` to it and remove the previous one.

        All ranks call ``write``, which raises alike on all. ``CheckpointError`` as in ``save``.
        """
        partial = self.folder / f".best_step_{step:08d}.partial"
        self._on_main(lambda: self._begin(partial))
        self._write(lambda: write(partial))
        self._on_main(lambda: self._publish(partial, "best", 1))

    def _write(self, work: Callable[[], T]) -> T:
        """Return ``work()``; ``CheckpointError`` on all ranks if it failed on one."""

        def failure(message: str) -> CheckpointError:
            return CheckpointError(
                f"{self.flag} {self.folder}: {message}. Checkpoints that were there before are untouched."
            )

        return collective(self.comm, work, (OSError, SafetensorError), raised=failure)

    def _on_main(self, work: Callable[[], object]) -> None:
        """Call ``work`` on rank 0; ``CheckpointError`` on all ranks if it fails."""
        self._write(work if self.is_main else lambda: None)

    def _write_manifest(self, partial: Path, step: int) -> None:
        """List size and checksum of all files in the manifest; each rank reads a share of the files."""
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        share = files[self.comm.rank :: self.comm.world_size]

        def describe() -> dict[str, Any]:
            return {str(file.relative_to(partial)): _describe(file) for file in share}

        described: dict[str, Any] = {}
        for entries in self.comm.all_gather_object(self._write(describe)):
            described.update(entries)
        manifest = json.dumps({"format": _FORMAT, "step": step, "files": described}, indent=1)
        self._on_main(lambda: (partial / MANIFEST).write_text(manifest))

    def _set_damaged_aside(self, damaged: Mapping[Path, str], newest: Path) -> None:
        """Rename damaged checkpoints, with a warning for each; ``latest`` then links to ``newest``."""
        for path, damage in damaged.items():
            logger.warning("%s is damaged (%s): set aside, the one before it is used", path, damage)
            if self.is_main:
                path.rename(_free_name(path, ".damaged"))
                self._link("latest", newest)

        # A barrier: no rank reads the folder before it is in order.
        self.comm.all_gather_object(None)

    def _take_folder(self) -> None:
        """Create the folder, lock it, and remove unfinished checkpoints of a killed run."""
        lock = self.folder / ".lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.touch()
            self._lock.acquire()
        except filelock.Timeout as error:
            raise ValueError(
                f"{self.flag} {self.folder}: another run writes there ({lock.read_text().strip()}). Wait for it or "
                "stop it, or give this run another folder."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise ValueError(
                    f"{self.flag} {self.folder}: cannot be written ({error}); choose another folder."
                ) from error
            logger.warning(
                "%s cannot be locked (%s): make sure that no second run uses it", self.folder, error
            )

        lock.write_text(
            f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n"
        )
        for path in self.folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    def _begin(self, partial: Path) -> None:
        """Make an empty folder ``partial``, and this folder too if it was removed after the start."""
        if not (self.folder / ".lock").exists():
            logger.warning(
                "%s %s was removed during the run: it is made again", self.flag, self.folder
            )
            self._lock.release(force=True)  # the lock of the removed file
            self._take_folder()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def _check_shared(self) -> None:
        """Raise ``ValueError`` if a rank does not see the lock of rank 0, for lack of a shared file system."""
        lock = self.folder / ".lock"
        content = lock.read_text() if lock.is_file() else ""
        if content != self.comm.all_gather_object(content)[0]:
            raise ValueError(
                f"{self.flag} {self.folder}: not the folder that rank 0 writes to. Several hosts need a shared "
                "--ckpt_path: give a folder on a file system that all of them mount."
            )

    def _publish(self, partial: Path, link: str, keep: int) -> None:
        """Rename ``partial`` in one step, link to it, and remove all but the ``keep`` newest."""
        for path in (*partial.rglob("*"), partial):
            _flush(path)

        final = self.folder / partial.name[1 : -len(".partial")]
        old = final.with_name(f".{final.name}.old.partial")
        if final.exists():  # the same step, as after ``trainer.save()`` twice
            final.rename(old)
        partial.rename(final)
        self._link(link, final)
        _flush(self.folder)
        shutil.rmtree(old, ignore_errors=True)

        kind = final.name.rpartition("_")[0]
        earlier = [path for path in of_steps(self.folder, kind) if path != final]
        for path in earlier[: len(earlier) - keep + 1]:
            # Renamed first, so that half a checkpoint never has the name of a complete one.
            removed = path.rename(self.folder / f".{path.name}.partial")
            shutil.rmtree(removed, ignore_errors=True)

    def _link(self, name: str, target: Path) -> None:
        """Point the link ``name`` to ``target``, in one step; only people read it."""
        new = self.folder / f".{name}.new"
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(target.name)
            new.replace(self.folder / name)
        except OSError as error:
            # The file system has no links, or a copy that followed the link has left a folder in its place.
            logger.warning("%s cannot link to %s (%s)", self.folder / name, target.name, error)

    def _damage(self, path: Path) -> str | None:
        """Return the first damage that a rank finds; each checks its share of the files."""

        def check_share() -> str | None:
            return damage_of(path, self.flag, share=self.comm.rank, n_shares=self.comm.world_size)

        damages = self.comm.all_gather_object(collective(self.comm, check_share))
        return next((damage for damage in damages if damage is not None), None)


def of_steps(folder: Path, kind: str = "step") -> list[Path]:
    """Return the checkpoints in ``folder``, sorted by step; for the kind ``best_step``, the best models."""
    steps: dict[Path, int] = {}
    for path in folder.glob(f"{kind}_*"):
        number = path.name.removeprefix(f"{kind}_")
        if number.isdigit():
            steps[path] = int(number)
    return sorted(steps, key=lambda path: steps[path])


def damage_of(path: Path, flag: str, share: int = 0, n_shares: int = 1) -> str | None:
    """Return the damage to one of ``n_shares`` shares of a checkpoint's files, None if there is none.

    ``ValueError`` with ``flag`` if they cannot be checked now: another format, no permission, a silent network disk.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written_format = manifest["format"]
        entries = manifest["files"]
        is_readable = written_format == _FORMAT
        names = [name for name in sorted(entries) if is_readable and Path(name).parts[0] != MODEL]

        for name in names[share::n_shares]:
            file = path / name
            entry = entries[name]
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                return f"{name} is missing or cut"
            if _sha256(file) != entry["sha256"]:
                return f"{name} has another checksum"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error!r}"
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector
            return str(error)
        remedy = "Start as the user who wrote it and with its disk in place, or give another --ckpt_path."
        raise ValueError(f"{flag} {path}: cannot be read ({error}). {remedy}") from error

    if written_format != _FORMAT:
        remedy = (
            f"is of another version of OpenPPO; this one reads {_FORMAT}. Resume with that version."
        )
        raise ValueError(f"{flag} {path}: format {written_format} {remedy}")
    return None


def _describe(file: Path) -> dict[str, Any]:
    """Return size and checksum of a file, read back once it would survive a power cut."""
    _flush(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _free_name(path: Path, kind: str = "") -> Path:
    """Return ``path`` with ``kind`` and the first free number appended."""
    number = 1
    while True:
        name = path.with_name(f"{path.name}{kind}.{number}")
        if not name.exists():
            return name
        number += 1
