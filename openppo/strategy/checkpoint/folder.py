"""A folder of checkpoints that are whole whenever they are there.

``step_00000012/`` is written as ``.step_00000012.partial``, checked against a full disk on all ranks, and renamed.
``manifest.json`` in it has the step, and the size and SHA-256 of each file; ``latest`` links to the newest.
"""

import errno
import hashlib
import itertools
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable
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
"""The folder of ``--save_hf_ckpt`` in a checkpoint: never read by a resume, so no change to it is damage."""
_FORMAT = 4


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class CheckpointFolder:
    """Checkpoints in ``folder``, which all ranks see; they call every method together.

    Rank 0 creates, renames and removes, and locks the folder for this run. Raises ``ValueError`` naming ``flag`` if
    the folder cannot be written, another run writes there, or a host does not share it.
    """

    def __init__(self, folder: Path, comm: Comm, keep: int, flag: str = "--ckpt_path") -> None:
        self.folder = folder
        self.comm = comm
        self.keep = keep
        self.flag = flag
        self.is_main = comm.rank == 0
        # One lock for all folders of this path in a process, as a run may be built twice in one.
        self._lock = filelock.FileLock(
            folder / ".lock", timeout=0, thread_local=False, is_singleton=True
        )
        collective(comm, lambda: self._take_folder() if self.is_main else None)
        collective(comm, self._check_shared)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have every rank ``write`` its files into a folder that then becomes the checkpoint of ``step``.

        ``write`` may call collectives only where all ranks raise alike. Raises ``CheckpointError`` on all ranks when
        one of them cannot write; what was written is removed and older checkpoints stay.
        """
        partial = self.folder / f".step_{step:08d}.partial"
        try:
            self._on_main(lambda: self._begin(partial))
            self._write(lambda: write(partial))
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            mine = files[self.comm.rank :: self.comm.world_size]
            described = self._write(
                lambda: {str(file.relative_to(partial)): _describe(file) for file in mine}
            )
            whole = {
                name: what
                for part in self.comm.all_gather_object(described)
                for name, what in part.items()
            }
            manifest = json.dumps({"format": _FORMAT, "step": step, "files": whole}, indent=1)
            self._on_main(lambda: (partial / MANIFEST).write_text(manifest))
            self._on_main(lambda: self._publish(partial, "latest", self.keep))
        except CheckpointError:
            if self.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self.folder / f"step_{step:08d}"

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None if there is none. Damaged newer ones are set aside.

        ``ValueError`` if all are damaged, or one cannot be read now (another format, no permission). Then all stay as
        they are, since a disk may only be missing.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(self.comm.all_gather_object(of_steps(self.folder))[0]):
            if (what := self._damage(path)) is not None:
                damaged[path] = what
                continue
            for worse, what in damaged.items():
                logger.warning(
                    "%s is damaged (%s): set aside, the one before it is used", worse, what
                )
                if self.is_main:
                    worse.rename(_free_name(worse, ".damaged"))
                    self._link("latest", path)
            self.comm.all_gather_object(None)
            return path
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
        found = of_steps(self.folder), of_steps(self.folder, "best_step")
        had_steps, had_best = self.comm.all_gather_object(found)[0]
        if not had_steps and not had_best:
            return
        aside = _free_name(self.folder)

        def move() -> None:
            links = [
                path for name in ("latest", "best") if (path := self.folder / name).is_symlink()
            ]
            aside.mkdir()
            for path in (*had_steps, *had_best, *self.folder.glob("*.damaged.*"), *links):
                shutil.move(path, aside)  # to another disk, where the folder is a mount point

        self._on_main(move)
        hint = "; --load_checkpoint would have resumed from them" if had_steps else ""
        logger.warning(
            "checkpoints or the best model of an earlier run are kept in %s%s", aside, hint
        )

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        """Have rank 0 ``write`` a model to ``best_step_...``, let ``best`` link to it and remove the previous one.

        All ranks call ``write``, which raises alike on all. ``CheckpointError`` as in ``save``.
        """
        partial = self.folder / f".best_step_{step:08d}.partial"
        self._on_main(lambda: self._begin(partial))
        self._write(lambda: write(partial))
        self._on_main(lambda: self._publish(partial, "best", 1))

    def _write(self, work: Callable[[], T]) -> T:
        """``work()``; ``CheckpointError`` on all ranks if it failed on one."""

        def failure(message: str) -> CheckpointError:
            place = f"{self.flag} {self.folder}"
            return CheckpointError(
                f"{place}: {message}. Checkpoints that were there before are untouched."
            )

        return collective(self.comm, work, (OSError, SafetensorError), raised=failure)

    def _on_main(self, work: Callable[[], object]) -> None:
        self._write(lambda: work() if self.is_main else None)

    def _take_folder(self) -> None:
        """Create the folder, lock it, and clear what a killed run had not finished."""
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
        """Make an empty ``partial``, and the folder too if it was removed after the start."""
        if not (self.folder / ".lock").exists():
            logger.warning(
                "%s %s was removed during the run: it is made again", self.flag, self.folder
            )
            self._lock.release(force=True)  # of the file that is gone
            self._take_folder()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def _check_shared(self) -> None:
        """``ValueError`` if a rank does not see the lock of rank 0, as on hosts without a shared file system."""
        lock = self.folder / ".lock"
        mine = lock.read_text() if lock.is_file() else ""
        if mine != self.comm.all_gather_object(mine)[0]:
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
        if final.exists():  # of the same step, as ``trainer.save()`` twice
            final.rename(old)
        partial.rename(final)
        self._link(link, final)
        _flush(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        earlier = [
            path for path in of_steps(self.folder, final.name.rpartition("_")[0]) if path != final
        ]
        for path in earlier[
            : len(earlier) - keep + 1
        ]:  # renamed first: half a checkpoint never has a whole one's name
            shutil.rmtree(path.rename(self.folder / f".{path.name}.partial"), ignore_errors=True)

    def _link(self, name: str, target: Path) -> None:
        """Let the link ``name`` point to ``target``, in one step; for people: nothing reads it back."""
        new = self.folder / f".{name}.new"
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(target.name)
            new.replace(self.folder / name)
        except (
            OSError
        ) as error:  # no links on this file system, or a copy that followed them has left a folder
            logger.warning("%s cannot link to %s (%s)", self.folder / name, target.name, error)

    def _damage(self, path: Path) -> str | None:
        """The first damage that a rank finds; each checks its share of the files."""
        share = self.comm.rank, self.comm.world_size
        found = collective(self.comm, lambda: damage_of(path, self.flag, *share))
        return next((what for what in self.comm.all_gather_object(found) if what is not None), None)


def of_steps(folder: Path, kind: str = "step") -> list[Path]:
    """Checkpoints in ``folder``, or with ``best_step`` models, by step."""
    steps = {path: path.name.removeprefix(f"{kind}_") for path in folder.glob(f"{kind}_*")}
    return sorted(
        (path for path, step in steps.items() if step.isdigit()), key=lambda path: int(steps[path])
    )


def damage_of(path: Path, flag: str, place: int = 0, n_places: int = 1) -> str | None:
    """The damage to one of ``n_places`` shares of a checkpoint's files, None if there is none.

    ``ValueError`` with ``flag`` if they cannot be checked now: another format, no permission, a silent network disk.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written = manifest["format"]
        names = [
            name
            for name in sorted(manifest["files"])
            if written == _FORMAT and Path(name).parts[0] != MODEL
        ]
        for name in names[place::n_places]:
            file, wanted = path / name, manifest["files"][name]
            if not file.is_file() or file.stat().st_size != wanted["bytes"]:
                return f"{name} is missing or cut"
            if _sha256(file) != wanted["sha256"]:
                return f"{name} has another checksum"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error!r}"
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector
            return str(error)
        remedy = "Start as the user who wrote it and with its disk in place, or give another --ckpt_path."
        raise ValueError(f"{flag} {path}: cannot be read ({error}). {remedy}") from error
    if written != _FORMAT:
        remedy = (
            f"is of another version of OpenPPO; this one reads {_FORMAT}. Resume with that version."
        )
        raise ValueError(f"{flag} {path}: format {written} {remedy}")
    return None


def _describe(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, read back once it would survive a power cut."""
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
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _free_name(path: Path, kind: str = "") -> Path:
    """``path`` with ``kind`` and the first free number appended."""
    return next(
        name
        for n in itertools.count(1)
        if not (name := path.with_name(f"{path.name}{kind}.{n}")).exists()
    )
