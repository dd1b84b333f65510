"""A folder of checkpoints that never holds half of one.

``step_00000012/`` is complete or not there: it is written as ``.step_00000012.partial``, checked against a full disk on
all ranks, and renamed. ``manifest.json`` in it has the size and SHA-256 of each file; ``latest`` links to the newest.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from openppo.strategy.checkpoint.lock import FolderLock
from openppo.strategy.checkpoint.manifest import (
    MANIFEST,
    UnreadableError,
    check_readable,
    describe,
    fault,
    flush,
    save_id,
    write_manifest,
)
from openppo.types import Comm

logger = logging.getLogger("openppo")
T = TypeVar("T")

_REPLACED = ".replaced"
_NAME = re.compile(r"step_(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


class CheckpointFolder:
    """Checkpoints in ``folder``, written and read by all ranks together.

    Ranks on hosts without a shared folder each see a folder of their own; the first rank of those that see the same
    one leads: it makes, renames and removes, and locks the folder for this run. Raises ``ValueError`` naming ``flag``
    if the folder cannot be written, or another run writes to it.
    """

    def __init__(self, folder: Path, comm: Comm, keep: int, flag: str = "--ckpt_path") -> None:
        self.folder = folder
        self.comm = comm
        self.keep = keep
        self.flag = flag
        self.neighbours = self._find_neighbours()
        self.place = self.neighbours.index(comm.rank)
        self.leads = self.place == 0
        self._lock = FolderLock()
        self._lock_folder()
        self._remove_left_over()

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have every rank ``write`` its files into a folder that then becomes the checkpoint of ``step``.

        ``write`` may call collectives only where all ranks raise alike. Raises ``CheckpointError`` on all ranks when
        one of them cannot write; what was written is removed and older checkpoints stay.
        """
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        this_save = self.comm.all_gather_object(secrets.token_hex(8))[0]  # hosts may hold different saves of one step
        try:
            self.together(lambda: _make_empty(partial) if self.leads else None)
            self.together(lambda: write(partial))
            mine = sorted(path for path in partial.rglob("*") if path.is_file())[self.place :: len(self.neighbours)]
            described = self.together(lambda: {str(file.relative_to(partial)): describe(file) for file in mine})
            files = {name: what for rank in self.neighbours for name, what in described[rank].items()}
            self.together(lambda: self._publish(partial, final, step, this_save, files))
        except CheckpointError:
            if self.leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_old()
        self._remove_replaced()
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole on all hosts; None if there is none. Damaged newer ones are set aside.

        ``ValueError`` if all are damaged, or one cannot be read here: another format, no permission. Then all stay as
        they are: a disk may only be missing.
        """
        steps = sorted(set.union(*self.comm.all_gather_object(self._steps())), reverse=True)
        damaged: list[tuple[Path, str]] = []
        for step in steps:
            path = self.folder / f"step_{step:08d}"
            self._read(path, check_readable)  # before anything is renamed
            self._take_the_save_of_all(path)
            if (what := self._damage(path)) is not None:
                damaged.append((path, what))
                continue
            for worse, what in damaged:
                logger.warning("%s is damaged (%s): set aside, the one before it is used", worse, what)
                if self.leads and worse.exists():
                    worse.rename(_free_name(worse, "damaged"))
            if damaged and self.leads:
                self.link("latest", path)
            self.comm.all_gather_object(None)
            self._remove_replaced()
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
        """Move what an earlier run has left here, checkpoints or a best model, into a folder beside this one.

        A new run's never mix with them. Whatever else lies here stays.
        """
        has_steps, has_best = bool(self._steps()), any(self.folder.glob("best_step_*"))
        everyones = self.comm.all_gather_object((has_steps, has_best))
        if not any(steps or best for steps, best in everyones):
            return
        aside = _free_name(self.folder, None)
        try:
            self.together(lambda: _move(self.folder, aside) if self.leads else None)
        except CheckpointError as error:
            raise ValueError(
                f"{error} An earlier run's checkpoints cannot be set aside: give --load_checkpoint to go on from them, "
                "or another --ckpt_path."
            ) from error
        if any(steps for steps, _ in everyones):
            logger.warning(
                "checkpoints of an earlier run are kept in %s; --load_checkpoint would have gone on from them", aside
            )
        else:
            logger.warning("the best model of an earlier run is kept in %s", aside)

    def earlier(self) -> list[Path]:
        """Folders of earlier runs that ``set_aside`` has renamed."""
        return sorted(self.folder.parent.glob(f"{self.folder.name}.[0-9]*"))

    def save_best(self, step: int, write: Callable[[Path], None]) -> None:
        """Have rank 0 ``write`` a model to ``best_step_...``, let ``best`` link to it and remove the one before.

        All ranks call ``write``, which raises alike on all. ``CheckpointError`` as in ``save``.
        """
        final = self.folder / f"best_step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        writes = self.comm.rank == 0
        self.together(lambda: _make_empty(partial) if writes else None)
        self.together(lambda: write(partial))

        def publish() -> None:
            if not writes:
                return
            for path in (*partial.rglob("*"), partial):
                flush(path)
            if final.exists():  # of the same step, by a run that went on from before it
                shutil.rmtree(final.rename(_free_name(final, "old")), ignore_errors=True)
            partial.rename(final)
            self.link("best", final)
            for old in self.folder.glob("best_step_*"):
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)

        self.together(publish)

    def link(self, name: str, target: Path) -> None:
        """Let the link ``name`` in this folder point to ``target``, in one step.

        For people: nothing reads it back. Where a file system has no links (exFAT, some network shares) it is a file
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
        """``CheckpointError`` on all ranks if there is no room for the ``n_bytes`` of all neighbours together.

        ``place`` is another folder than this one, with its flag.
        """
        everyones = self.comm.all_gather_object(n_bytes)
        wanted = sum(everyones[rank] for rank in self.neighbours)
        flag, folder = place or (self.flag, self.folder)

        def check() -> None:
            free = shutil.disk_usage(folder).free
            if free < wanted:
                raise CheckpointError(
                    f"{flag} {folder}: {what} {_gib(wanted)} and {_gib(free)} are free there: {remedy}"
                )

        self.together(check)

    def together(self, work: Callable[[], T]) -> list[T]:
        """The results of ``work`` on all ranks, in rank order; ``CheckpointError`` on all if it failed on one."""
        result, error = None, None
        try:
            result = work()
        except CheckpointError as failure:
            error = str(failure)
        except (OSError, SafetensorError) as failure:
            error = f"{self.flag} {self.folder}: {failure}"
        gathered: list[tuple[Any, str | None]] = self.comm.all_gather_object((result, error))
        for rank, (_, message) in enumerate(gathered):
            if message is not None:
                where = f" (rank {rank})" if self.comm.world_size > 1 else ""
                raise CheckpointError(
                    f"{message.rstrip('.')}{where}. Checkpoints that were there before are untouched."
                )
        return [value for value, _ in gathered]

    def _find_neighbours(self) -> list[int]:
        """The ranks that see the same folder as this one."""
        mine, fault = self.folder / f".rank-{self.comm.rank}-{secrets.token_hex(8)}", None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
        except OSError as error:
            fault = f"{self.flag} {self.folder}: cannot be written ({error}); choose another folder."
        everyones = self.comm.all_gather_object((mine.name, fault))
        for _, message in everyones:
            if message is not None:
                raise ValueError(message)
        seen = [rank for rank, (name, _) in enumerate(everyones) if (self.folder / name).exists()]
        self.comm.all_gather_object(None)  # all have looked
        mine.unlink()
        return seen

    def _lock_folder(self) -> None:
        holder = self._lock.take(self.folder) if self.leads else None
        for rank, name in enumerate(self.comm.all_gather_object(holder)):
            if name is not None:
                raise ValueError(
                    f"{self.flag} {self.folder}: another run writes there ({name}; seen by rank {rank}). Wait for it "
                    "or stop it, or give this run another folder."
                )

    def _steps(self) -> set[int]:
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return {int(name[1]) for name in names if name}

    def _publish(self, partial: Path, final: Path, step: int, this_save: str, files: dict[str, Any]) -> None:
        if not self.leads:
            return
        write_manifest(partial, step, this_save, files)
        for path in (partial / MANIFEST, *(p for p in partial.rglob("*") if p.is_dir()), partial):
            flush(path)
        replaced = _replaced(final)
        if final.exists():  # of the same step: it was stopped in the next, or resumed from an older one
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        self.link("latest", final)
        flush(self.folder)

    def _take_the_save_of_all(self, path: Path) -> None:
        """After a kill between the renames of two hosts: those that were first go back to the save that all have."""
        mine = save_id(path), save_id(_replaced(path))
        everyones = self.comm.all_gather_object(mine)
        common = set.intersection(*map(set, everyones)) - {None}
        if self.leads and common and mine[0] not in common:
            shutil.rmtree(path)
            _replaced(path).rename(path)
        self.comm.all_gather_object(None)

    def _remove_replaced(self) -> None:
        """Older saves of a step, once all hosts have the new one."""
        for path in self.folder.glob(f"step_*{_REPLACED}") if self.leads else ():
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self) -> None:
        """Keep the newest ``keep``; a folder that is being removed has another name, so it is never taken for one."""
        if not self.leads:
            return
        old = [self.folder / f"step_{step:08d}" for step in sorted(self._steps())[: -self.keep]]
        for path in old:
            shutil.rmtree(path.rename(_free_name(path, "old")), ignore_errors=True)

    def _remove_left_over(self) -> None:
        """What a run that was killed had half written, half removed, or not yet replaced."""
        for path in self.folder.glob(f"step_*{_REPLACED}") if self.leads else ():
            if not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
        for path in (*self.folder.glob("step_*.old.*"), *self.folder.glob(".*.partial")) if self.leads else ():
            shutil.rmtree(path, ignore_errors=True)

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint on any host; ``ValueError`` on all ranks where one cannot read it."""
        found = self._read(path, lambda it: fault(it, self.place, len(self.neighbours)))
        damage = next((what for what in found if what is not None), None)
        if damage is None and len(set(self.comm.all_gather_object(save_id(path)))) > 1:
            return "its parts on several hosts are not of one save"
        return damage

    def _read(self, path: Path, work: Callable[[Path], T]) -> list[T | None]:
        """The results of all ranks; ``ValueError`` on all where a checkpoint that may be whole cannot be read."""
        result, unreadable = None, None
        try:
            result = work(path)
        except UnreadableError as error:
            unreadable = str(error)
        everyones = self.comm.all_gather_object((result, unreadable))
        for _, message in everyones:
            if message is not None:
                raise ValueError(f"{self.flag} {path}: {message}")
        return [value for value, _ in everyones]

    def _refuse_foreign(self) -> None:
        """Checkpoints of DeepSpeed and others are pickles: reading one runs whatever code it holds."""
        pickles = sorted(p for p in self.folder.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"))
        if pickles:
            raise ValueError(
                f"{self.flag} {self.folder}: holds no checkpoint of OpenPPO but {pickles[0].relative_to(self.folder)}, "
                "a pickle, which could run any code when it is read. Save its model as safetensors in Hugging Face "
                "format and start from that with --pretrain; optimizer states cannot be taken over."
            )


def _replaced(path: Path) -> Path:
    """Where the checkpoint at ``path`` is kept until another of its step is there on all hosts."""
    return path.with_name(path.name + _REPLACED)


def _move(folder: Path, aside: Path) -> None:
    """What runs have left in ``folder``, all of it or nothing."""
    aside.mkdir()
    ours = (folder.glob(pattern) for pattern in ("step_*", "best_step_*", "latest", "best"))
    moved: list[Path] = []
    try:
        for path in sorted({path for found in ours for path in found}):
            moved.append(path.rename(aside / path.name))
    except OSError:  # a mount point, say: its neighbour is another disk
        for path in moved:
            path.rename(folder / path.name)
        aside.rmdir()
        raise


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _free_name(path: Path, kind: str | None) -> Path:
    """``path`` with ``kind`` and the first free number behind it."""
    stem = path.name if kind is None else f"{path.name}.{kind}"
    number = 1
    while (name := path.with_name(f"{stem}.{number}")).exists():
        number += 1
    return name


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
