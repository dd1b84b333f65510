"""A folder of checkpoints that are whole whenever they are there.

``step_00000012/`` is written as ``.step_00000012.partial``, checked against a full disk on all ranks, and renamed.
``manifest.json`` in it has the step, and the size and SHA-256 of each file; ``latest`` links to the newest.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import filelock
from safetensors import SafetensorError

from openppo.strategy.comm import collective
from openppo.types import Comm

logger = logging.getLogger("openppo")
T = TypeVar("T")

MANIFEST = "manifest.json"
MODEL = "model"
"""The folder of ``--save_hf_ckpt`` in a checkpoint: never read by a resume, so no change to it is damage."""
_FORMAT = 3
_REPLACED = ".replaced"
_NAME = re.compile(r"(?:best_)?step_\d{8,}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class UnreadableError(Exception):
    """A checkpoint that may be whole cannot be read."""


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
        self._lock = filelock.FileLock(folder / ".lock", timeout=0, thread_local=False, is_singleton=True)
        collective(comm, self._take_folder)
        self._check_shared()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have every rank ``write`` its files into a folder that then becomes the checkpoint of ``step``.

        ``write`` may call collectives only where all ranks raise alike. Raises ``CheckpointError`` on all ranks when
        one of them cannot write; what was written is removed and older checkpoints stay.
        """
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        try:
            self._write(lambda: _make_empty(partial) if self.is_main else None)
            self._write(lambda: write(partial))
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            mine = files[self.comm.rank :: self.comm.world_size]
            described = self._write(lambda: {str(file.relative_to(partial)): _describe(file) for file in mine})
            files_of_ranks = self.comm.all_gather_object(described)
            whole = {name: what for of_rank in files_of_ranks for name, what in of_rank.items()}
            manifest = json.dumps({"format": _FORMAT, "step": step, "files": whole}, indent=1)
            self._write(lambda: (partial / MANIFEST).write_text(manifest) if self.is_main else None)
            self._write(lambda: self._publish(partial, final, "latest", self.keep) if self.is_main else None)
        except CheckpointError:
            if self.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None if there is none. Damaged newer ones are set aside.

        ``ValueError`` if all are damaged, or one cannot be read now (another format, no permission). Then all stay as
        they are, since a disk may only be missing.
        """
        damaged: list[tuple[Path, str]] = []
        for path in reversed(self.comm.all_gather_object(self._of_steps())[0]):
            if (what := self._damage(path)) is not None:
                damaged.append((path, what))
                continue
            for worse, what in damaged:
                logger.warning("%s is damaged (%s): set aside, the one before it is used", worse, what)
                if self.is_main:
                    worse.rename(_free_name(worse, "damaged"))
            if damaged and self.is_main:
                self.link("latest", path)
            self.comm.all_gather_object(None)
            return path
        if damaged:
            raise ValueError(
                f"{self.flag} {self.folder}: all checkpoints there are damaged (the newest: {damaged[0][1]}). If a "
                "disk is missing, start again with it. To begin anew, start without --load_checkpoint, which keeps "
                "them in a folder of their own, or with another --ckpt_path."
            )
        self._refuse_foreign()
        return None

    def set_aside(self) -> None:
        """Move an earlier run's checkpoints and best model to a folder next to this one; other files stay."""
        had_steps, had_best = self.comm.all_gather_object((self._of_steps(), self._of_steps("best_step")))[0]
        if not had_steps and not had_best:
            return
        aside = _free_name(self.folder, None)
        try:
            self._write(lambda: _move(self.folder, aside) if self.is_main else None)
        except CheckpointError as error:
            raise ValueError(
                f"{error} An earlier run's checkpoints cannot be set aside: give --load_checkpoint to resume from "
                "them, or another --ckpt_path."
            ) from error
        if had_steps:
            logger.warning(
                "checkpoints of an earlier run are kept in %s; --load_checkpoint would have resumed from them", aside
            )
        else:
            logger.warning("the best model of an earlier run is kept in %s", aside)

    def earlier(self) -> list[Path]:
        """Folders of earlier runs that ``set_aside`` has renamed."""
        return sorted(self.folder.parent.glob(f"{self.folder.name}.[0-9]*"))

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        """Have rank 0 ``write`` a model to ``best_step_...``, let ``best`` link to it and remove the previous one.

        All ranks call ``write``, which raises alike on all. ``CheckpointError`` as in ``save``.
        """
        final = self.folder / f"best_step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        self._write(lambda: _make_empty(partial) if self.is_main else None)
        self._write(lambda: write(partial))
        self._write(lambda: self._publish(partial, final, "best", 1) if self.is_main else None)

    def link(self, name: str, target: Path) -> None:
        """Let the link ``name`` in this folder point to ``target``, in one step.

        For people: nothing reads it back. On a file system without links (exFAT, some network shares) it is a file
        that holds the name. A folder in its place, which a copy that follows links leaves, is set aside.
        """
        new, old = self.folder / f".{name}.new", self.folder / name
        if old.is_dir() and not old.is_symlink():
            aside = old.rename(_free_name(old, "copied"))
            logger.warning("%s is a folder, not a link: set aside as %s, which can be removed", old, aside.name)
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(target.name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning("%s: no links here (%s): %s is a file with the name", self.folder, error.strerror, name)
            new.write_text(f"{target.name}\n")
        new.replace(old)

    def check_space(
        self, n_bytes: int, remedy: str, what: str = "a checkpoint takes", place: tuple[str, Path] | None = None
    ) -> None:
        """``CheckpointError`` on all ranks if the disk has no room for the ``n_bytes`` of all ranks together.

        ``place`` is another folder than this one, with its flag.
        """
        wanted = sum(self.comm.all_gather_object(n_bytes))
        flag, folder = place or (self.flag, self.folder)

        def check() -> None:
            free = shutil.disk_usage(folder).free
            if free < wanted:
                raise CheckpointError(
                    f"{flag} {folder}: {what} {wanted / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free there: "
                    f"{remedy}"
                )

        self._write(lambda: check() if self.is_main else None)

    def _write(self, work: Callable[[], T]) -> T:
        """``work()``; ``CheckpointError`` on all ranks if it failed on one."""

        def failure(message: str) -> CheckpointError:
            return CheckpointError(f"{message.rstrip('.')}. Checkpoints that were there before are untouched.")

        def named() -> T:
            try:
                return work()
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.flag} {self.folder}: {error}") from error

        return collective(self.comm, named, CheckpointError, failure)

    def _take_folder(self) -> None:
        """On rank 0: create the folder, lock it, and clear what a killed run had not finished."""
        if not self.is_main:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".lock").touch()
            self._lock.acquire()
            (self.folder / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        except filelock.Timeout as error:
            holder = (self.folder / ".lock").read_text().strip() or "unknown"
            raise ValueError(
                f"{self.flag} {self.folder}: another run writes there ({holder}). Wait for it or stop it, or give this "
                "run another folder."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise ValueError(
                    f"{self.flag} {self.folder}: cannot be written ({error}); choose another folder."
                ) from error
            logger.warning("%s cannot be locked (%s): make sure that no second run uses it", self.folder, error)
        for path in self.folder.glob(f"*step_*{_REPLACED}"):
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for pattern in (f"*step_*{_REPLACED}", "*step_*.old.*", ".*.partial", ".shared-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)

    def _check_shared(self) -> None:
        """``ValueError`` if a rank does not see the folder of rank 0, as on hosts without a shared file system."""
        probe = self.folder / self.comm.all_gather_object(f".shared-{secrets.token_hex(8)}")[0]
        self._write(lambda: probe.mkdir() if self.is_main else None)

        def look() -> None:
            if not probe.exists():
                raise ValueError(
                    f"{self.flag} {self.folder}: not the folder that rank 0 writes to. Several hosts need a shared "
                    "--ckpt_path: give a folder on a file system that all of them mount."
                )

        collective(self.comm, look)
        if self.is_main:
            probe.rmdir()

    def _of_steps(self, kind: str = "step") -> list[Path]:
        """Checkpoints, or with ``best_step`` models, by step."""
        paths = [path for path in self.folder.glob(f"{kind}_*") if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.name.rpartition("_")[2]))

    def _publish(self, partial: Path, final: Path, link: str, keep: int) -> None:
        """Rename ``partial`` to ``final`` in one step, link to it, and remove all but the ``keep`` newest."""
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():  # of the same step, by a run resumed from an earlier one
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        self.link(link, final)
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        earlier = [path for path in self._of_steps(final.name.rpartition("_")[0]) if path != final]
        for path in earlier[: len(earlier) - keep + 1]:  # renamed first: half a checkpoint never has a whole one's name
            shutil.rmtree(path.rename(_free_name(path, "old")), ignore_errors=True)

    def _damage(self, path: Path) -> str | None:
        """The first damage that a rank finds; each checks its share of the files."""
        rank, n_ranks = self.comm.rank, self.comm.world_size
        found = collective(
            self.comm,
            lambda: damage_of(path, rank, n_ranks),
            UnreadableError,
            lambda message: ValueError(f"{self.flag} {path}: {message}"),
        )
        return next((what for what in self.comm.all_gather_object(found) if what is not None), None)

    def _refuse_foreign(self) -> None:
        """Checkpoints of DeepSpeed and others are pickles: reading one runs whatever code it holds."""
        pickles = sorted(p for p in self.folder.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"))
        if pickles:
            raise ValueError(
                f"{self.flag} {self.folder}: holds no checkpoint of OpenPPO but {pickles[0].relative_to(self.folder)}, "
                "a pickle, which could run any code when it is read. Save its model as safetensors in Hugging Face "
                "format and start from that with --pretrain; optimizer states cannot be taken over."
            )


def damage_of(path: Path, place: int = 0, n_places: int = 1) -> str | None:
    """The damage to one of ``n_places`` shares of a checkpoint's files, None if there is none.

    ``UnreadableError`` if they cannot be checked now: another format, no permission, a silent network disk.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        written = manifest.get("format") if isinstance(manifest, dict) else None
        if isinstance(written, int) and written != _FORMAT:
            raise UnreadableError(
                f"format {written} is of another version of OpenPPO; this one reads {_FORMAT}. Resume with that "
                "version."
            )
        names = [name for name in sorted(manifest["files"]) if Path(name).parts[0] != MODEL]
        for name in names[place::n_places]:
            file, wanted = path / name, manifest["files"][name]
            if not file.is_file() or file.stat().st_size != wanted["bytes"]:
                return f"{name} is missing or cut"
            if _sha256(file) != wanted["sha256"]:
                return f"{name} has another checksum"
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if missing or error.errno == errno.EIO:  # a bad sector
            return str(error)
        raise UnreadableError(
            f"cannot be read ({error}). Start as the user who wrote it and with its disk in place, or give another "
            "--ckpt_path."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"{MANIFEST}: {error!r}"
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


def _move(folder: Path, aside: Path) -> None:
    """Move what runs have left in ``folder``, all of it or nothing."""
    aside.mkdir()
    ours = (folder.glob(pattern) for pattern in ("step_*", "best_step_*", "latest", "best"))
    moved: list[Path] = []
    try:
        for path in sorted({path for found in ours for path in found}):
            moved.append(path.rename(aside / path.name))
    except OSError:  # for example a mount point, whose neighbour is another disk
        for path in moved:
            path.rename(folder / path.name)
        aside.rmdir()
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _free_name(path: Path, kind: str | None) -> Path:
    """``path`` with ``kind`` and the first free number appended."""
    stem = path.name if kind is None else f"{path.name}.{kind}"
    number = 1
    while (name := path.with_name(f"{stem}.{number}")).exists():
        number += 1
    return name
