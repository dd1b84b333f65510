"""A checkpoint is whole or not there, whatever happens while it is written; several ranks are threads here."""

from __future__ import annotations

import errno
import io
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from openppo.strategy.checkpoint import CheckpointError, CheckpointFolder
from openppo.types import SingleProcess


class ThreadComm:
    """The ranks of a group as threads; only what a checkpoint folder calls."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(values)
        self._values, self._barrier = values, barrier

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        raise AssertionError("not called")

    def all_gather_object(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        gathered = list(self._values)
        self._barrier.wait()
        return gathered


def on_ranks(n: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """What ``work`` returns or raises on each of ``n`` ranks."""
    values, barrier = [None] * n, threading.Barrier(n, timeout=30)

    def run(rank: int) -> Any:
        try:
            return work(ThreadComm(rank, values, barrier))
        except (CheckpointError, ValueError) as error:
            return error

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(run, range(n)))


def write(text: str, name: str = "a.txt") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def folder_of(path: Path, keep: int = 3) -> CheckpointFolder:
    return CheckpointFolder(path, SingleProcess(), keep)


def names(path: Path) -> list[str]:
    """What lies there, but for the lock."""
    return sorted({entry.name for entry in path.iterdir()} - {".lock"})


def test_the_newest_checkpoint_is_found_with_what_was_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c")
    folder.save(9, write("nine"))
    folder.save(10, write("ten"))
    newest = folder_of(tmp_path / "c").newest()
    assert newest is not None
    assert (newest / "a.txt").read_text() == "ten"
    assert (tmp_path / "c" / "latest").resolve() == newest


def test_where_a_file_system_has_no_links_a_file_names_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = folder_of(tmp_path)
    for step in (1, 2):
        folder.save(step, write(str(step)))
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    newest = folder_of(tmp_path).newest()
    assert newest is not None
    assert newest.name == "step_00000002"
    assert "no links here (Operation not permitted)" in caplog.text


def test_a_copy_that_followed_the_links_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As by ``cp -rL``: what were links are folders then."""
    folder = folder_of(tmp_path / "c")
    folder.save(1, write("one"))
    folder.save_best(1, write("best"))
    shutil.copytree(tmp_path / "c", tmp_path / "copy", symlinks=False)
    copy = folder_of(tmp_path / "copy")
    copy.newest()
    copy.save(2, write("two"))
    copy.save_best(2, write("better"))
    assert (tmp_path / "copy" / "latest" / "a.txt").read_text() == "two"
    assert (tmp_path / "copy" / "best" / "a.txt").read_text() == "better"
    assert "is a folder, not a link: set aside as latest.copied.1" in caplog.text


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def half(folder: Path) -> None:
        (folder / "a.txt").write_text("half")
        raise Killed

    folder = folder_of(tmp_path)
    folder.save(1, write("one"))
    with pytest.raises(Killed):
        folder.save(2, half)
    assert ".step_00000002.partial" in names(tmp_path)
    again = folder_of(tmp_path)
    newest = again.newest()
    assert newest is not None
    assert newest.name == "step_00000001"
    assert names(tmp_path) == ["latest", "step_00000001"], "what was half written is gone"


@pytest.mark.parametrize("step", ["manifest", "rename", "link"])
def test_a_process_killed_while_it_publishes_leaves_a_whole_checkpoint(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    folder = folder_of(tmp_path)
    folder.save(1, write("one"))
    if step == "manifest":
        monkeypatch.setattr("openppo.strategy.checkpoint.manifest.json.dumps", killed)
    elif step == "rename":
        monkeypatch.setattr(Path, "rename", killed)
    else:
        monkeypatch.setattr(CheckpointFolder, "link", killed)
    with pytest.raises(Killed):
        folder.save(2, write("two"))
    monkeypatch.undo()
    newest = folder_of(tmp_path).newest()
    assert newest is not None
    assert (newest / "a.txt").read_text() == ("two" if step == "link" else "one")
    assert (tmp_path / "latest" / "a.txt").read_text() == "one", "it never points at half of one"


def test_a_rank_that_cannot_write_ends_the_save_on_all_and_older_checkpoints_stay(tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path, comm, keep=1)
        folder.save(1, write("one", f"{comm.rank}.txt"))

        def fail(path: Path) -> None:
            if comm.rank == 1:
                raise OSError(28, "No space left on device")
            (path / "0.txt").write_text("two")

        folder.save(2, fail)

    errors = on_ranks(2, work)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "No space left on device (rank 1). Checkpoints that were there before are untouched" in str(error)
    assert names(tmp_path) == ["latest", "step_00000001"]
    assert names(tmp_path / "step_00000001") == ["0.txt", "1.txt", "manifest.json"]


def write_both(path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (path / name).write_text("content")


def cut(path: Path) -> None:
    (path / "b.txt").write_bytes((path / "b.txt").read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray((path / "b.txt").read_bytes())
    content[1] ^= 1
    (path / "b.txt").write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a file that is cut": cut,
    "a bit that has flipped": flip,
    "a file that is gone": lambda path: (path / "b.txt").unlink(),
    "a manifest that is cut": lambda path: (path / "manifest.json").write_text('{"format": 1, "fil'),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "a manifest of something else": lambda path: (path / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, damage: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    def save(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path, comm, keep=3)
        for step in (1, 2):
            folder.save(step, write_both)

    on_ranks(ranks, save)
    DAMAGE[damage](tmp_path / "step_00000002")
    with caplog.at_level(logging.WARNING, "openppo"):
        found = on_ranks(ranks, lambda comm: CheckpointFolder(tmp_path, comm, keep=3).newest())
    assert found == [tmp_path / "step_00000001"] * ranks
    assert "step_00000002 is damaged" in caplog.text
    assert "step_00000002.damaged.1" in names(tmp_path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, keep=2)
    for step in (5, 10, 99_999_999, 100_000_000):
        folder.save(step, write(str(step)))
    assert names(tmp_path) == ["latest", "step_100000000", "step_99999999"]
    newest = folder.newest()
    assert newest is not None
    assert newest.name == "step_100000000"


def test_an_earlier_runs_checkpoints_are_set_aside_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "c")
    folder.set_aside()
    assert names(tmp_path) == ["c"], "an empty folder stays"
    folder.save(4, write("four"))
    folder_of(tmp_path / "c").set_aside()
    assert names(tmp_path) == ["c", "c.1"]
    assert names(tmp_path / "c") == []
    assert "--load_checkpoint would have gone on from them" in caplog.text


def test_the_best_model_of_an_earlier_run_is_set_aside_where_it_is_all_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of --save_steps 0: the first evaluation of a new run would have replaced it."""
    folder_of(tmp_path / "c").save_best(7, write("seven"))
    folder = folder_of(tmp_path / "c")
    folder.set_aside()
    folder.save_best(1, write("one"))
    assert (tmp_path / "c.1" / "best" / "a.txt").read_text() == "seven"
    assert names(tmp_path / "c") == ["best", "best_step_00000001"]
    assert f"the best model of an earlier run is kept in {tmp_path}/c.1" in caplog.text


def test_hosts_without_a_shared_folder_each_hold_a_whole_checkpoint(tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> list[int]:
        folder = CheckpointFolder(tmp_path / str(comm.rank // 2), comm, keep=3)
        for step in (1, 2):
            folder.save(step, write(str(comm.rank), f"{comm.rank}.txt"))
        return folder.neighbours

    assert on_ranks(4, work) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert names(tmp_path / "0" / "step_00000002") == ["0.txt", "1.txt", "manifest.json"]
    assert names(tmp_path / "1" / "step_00000002") == ["2.txt", "3.txt", "manifest.json"]
    shutil.rmtree(tmp_path / "1" / "step_00000002")  # what one host lacks is of no use to the others
    found = on_ranks(4, lambda comm: CheckpointFolder(tmp_path / str(comm.rank // 2), comm, keep=3).newest())
    assert [path.name for path in found] == ["step_00000001"] * 4


@pytest.mark.parametrize("killed_at", ["before its rename", "between its renames"])
def test_hosts_killed_while_they_replace_a_checkpoint_go_on_from_one_save(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 0 had the new save of the step already, host 1 had not."""

    def folder_on(comm: ThreadComm) -> CheckpointFolder:
        return CheckpointFolder(tmp_path / str(comm.rank), comm, keep=1)

    on_ranks(2, lambda comm: folder_on(comm).save(4, write(f"old of {comm.rank}")))
    shutil.copytree(tmp_path / "1" / "step_00000004", tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_remove_replaced", lambda self: None)
        on_ranks(2, lambda comm: folder_on(comm).save(4, write(f"new of {comm.rank}")))
    shutil.rmtree(tmp_path / "1" / "step_00000004")
    shutil.rmtree(tmp_path / "1" / "step_00000004.replaced")
    place = "step_00000004" if killed_at == "before its rename" else "step_00000004.replaced"
    (tmp_path / "old").rename(tmp_path / "1" / place)

    found = on_ranks(2, lambda comm: folder_on(comm).newest())
    assert [(path / "a.txt").read_text() for path in found] == ["old of 0", "old of 1"]
    assert [names(tmp_path / host) for host in "01"] == [["latest", "step_00000004"]] * 2


def test_parts_of_different_saves_are_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Host 1 was given the folder of another run with the same steps."""

    def save(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path / str(comm.rank), comm, keep=3)
        for step in (1, 2):
            folder.save(step, write(str(comm.rank)))

    on_ranks(2, save)
    folder_of(tmp_path / "another").save(2, write("1"))
    shutil.rmtree(tmp_path / "1" / "step_00000002")
    shutil.copytree(tmp_path / "another" / "step_00000002", tmp_path / "1" / "step_00000002")
    found = on_ranks(2, lambda comm: CheckpointFolder(tmp_path / str(comm.rank), comm, keep=3).newest())
    assert [path.name for path in found] == ["step_00000001"] * 2
    assert "is damaged (its parts on several hosts are not of one save): set aside" in caplog.text
    assert all("step_00000002.damaged.1" in names(tmp_path / host) for host in "01")


@pytest.mark.parametrize("name", ["global_step5/mp_rank_00_model_states.pt", "optimizer.bin", "x.ckpt"])
def test_a_pickle_from_elsewhere_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    with pytest.raises(ValueError, match=f"--ckpt_path .*{name.split('/')[-1]}, a pickle, which could run any code"):
        folder_of(tmp_path).newest()


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = on_ranks(2, lambda comm: CheckpointFolder(tmp_path / ("file" if comm.rank else "c") / "x", comm, keep=1))
    assert all("--ckpt_path" in str(error) and "choose another folder" in str(error) for error in errors)


def test_too_little_space_is_an_error_on_all_ranks_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 3 * 2**30))  # type: ignore[attr-defined]

    def work(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path, comm, keep=1)
        folder.check_space(2**30, "make room.")
        folder.check_space(2**31, "make room.")

    for error in on_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "a checkpoint takes 4.00 GiB and 3.00 GiB are free there: make room" in str(error)
        assert "make room" in str(error)


def test_space_is_checked_on_hosts_with_unequal_numbers_of_ranks(tmp_path: Path) -> None:
    """Ranks that asked once for each neighbour waited for each other."""

    def work(comm: ThreadComm) -> str:
        folder = CheckpointFolder(tmp_path / ("a" if comm.rank < 3 else "b"), comm, keep=1)
        folder.check_space(2**60 if comm.rank == 3 else 1, "make room")
        return "enough"

    errors = on_ranks(4, work)
    assert all("takes 1073741824.00 GiB" in str(error) and "(rank 3)" in str(error) for error in errors)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_disk_that_fills_up_while_writing_loses_no_older_checkpoint(full_disk: Path) -> None:
    folder = folder_of(full_disk, keep=1)
    folder.save(1, lambda path: save_file({"a": torch.ones(50_000)}, path / "a.safetensors"))
    with pytest.raises(CheckpointError, match=r"--ckpt_path .*No space left|os error 28"):
        folder.save(2, lambda path: save_file({"a": torch.ones(500_000)}, path / "a.safetensors"))
    assert names(full_disk) == ["latest", "step_00000001"]
    newest = folder.newest()
    assert newest is not None
    folder.save(3, lambda path: save_file({"a": torch.zeros(50_000)}, path / "a.safetensors"))
    assert names(full_disk) == ["latest", "step_00000003"]


def test_the_best_model_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.save_best(3, write("three"))
    folder.save_best(7, write("seven"))
    assert (tmp_path / "best" / "a.txt").read_text() == "seven"
    assert names(tmp_path) == ["best", "best_step_00000007"]
    assert folder.newest() is None, "it is a model, no checkpoint"


def test_a_checkpoint_of_the_same_step_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.save(1, write("sampling"))
    folder.save(1, write("training"))
    assert (tmp_path / "step_00000001" / "a.txt").read_text() == "training"
    assert names(tmp_path) == ["latest", "step_00000001"]


@pytest.mark.parametrize("ends", ["killed", "an error"])
def test_the_only_checkpoint_survives_when_its_replacement_fails(
    tmp_path: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    folder, rename = folder_of(tmp_path, keep=1), Path.rename
    folder.save(1, write("old"))

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise Killed if ends == "killed" else OSError(116, "Stale file handle")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(Killed if ends == "killed" else CheckpointError):
        folder.save(1, write("new"))
    monkeypatch.undo()
    newest = folder_of(tmp_path, keep=1).newest()
    assert newest is not None
    assert (newest / "a.txt").read_text() == "old"


def test_when_all_are_damaged_the_run_does_not_start_over_in_silence(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for step in (1, 2):
        folder.save(step, write_both)
        cut(tmp_path / f"step_{step:08d}")
    for _ in range(2):  # torchrun --max_restarts starts again with the same command
        with pytest.raises(ValueError, match="all checkpoints there are damaged.*without --load_checkpoint"):
            folder.newest()
        assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"], "they stay as they are"


def test_checkpoints_stay_when_the_disk_of_one_host_is_missing(tmp_path: Path) -> None:
    def save(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path / str(comm.rank), comm, keep=3)
        for step in (1, 2):
            folder.save(step, write(str(comm.rank)))

    def newest(comm: ThreadComm) -> Path | None:
        return CheckpointFolder(tmp_path / str(comm.rank), comm, keep=3).newest()

    on_ranks(2, save)
    (tmp_path / "1").rename(tmp_path / "unmounted")
    assert all("If a disk is missing" in str(error) for error in on_ranks(2, newest))
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "unmounted").rename(tmp_path / "1")
    assert on_ranks(2, newest) == [tmp_path / "0" / "step_00000002", tmp_path / "1" / "step_00000002"]


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.ESTALE, "Stale")])
@pytest.mark.parametrize("name", ["manifest.json", "a.txt"])
def test_a_checkpoint_that_cannot_be_read_now_is_no_damaged_one(
    tmp_path: Path, name: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    for step in (1, 2):
        folder.save(step, write("text"))
    real = io.open

    def open_or_fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(tmp_path / "step_00000002" / name):
            raise error
        return real(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", open_or_fail)
        with pytest.raises(ValueError, match="step_00000002: cannot be read .*another --ckpt_path"):
            folder.newest()
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000002"]
    assert folder.newest() == tmp_path / "step_00000002"


def test_what_becomes_of_the_model_in_a_checkpoint_damages_nothing(tmp_path: Path) -> None:
    def write_with_model(partial: Path) -> None:
        write_both(partial)
        (partial / "model").mkdir()
        (partial / "model" / "config.json").write_text("{}")

    folder = folder_of(tmp_path)
    folder.save(1, write_with_model)
    (tmp_path / "step_00000001" / "model" / "config.json").write_text('{"edited": true}')
    assert folder.newest() == tmp_path / "step_00000001"
    shutil.rmtree(tmp_path / "step_00000001" / "model")
    assert folder.newest() == tmp_path / "step_00000001"


def test_setting_aside_leaves_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    """With --ckpt_path at or above --save_path models, logs and data lie there too."""
    folder = folder_of(tmp_path / "c")
    folder.save(4, write("four"))
    folder.save_best(3, write("three"))
    (tmp_path / "c" / "logs").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    folder.set_aside()
    assert names(tmp_path / "c") == ["config.json", "logs"]
    assert names(tmp_path / "c.1") == ["best", "best_step_00000003", "latest", "step_00000004"]
    assert (tmp_path / "c.1" / "latest" / "a.txt").read_text() == "four"


def test_a_checkpoint_of_another_version_is_no_damaged_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.save(1, write("one"))
    (tmp_path / "step_00000001" / "manifest.json").write_text('{"format": 99, "files": {}}')
    with pytest.raises(ValueError, match="format 99 is of another version of OpenPPO; this one reads 2"):
        folder.newest()
    assert names(tmp_path) == ["latest", "step_00000001"]


def test_a_second_run_in_the_folder_of_a_living_one_is_refused(tmp_path: Path) -> None:
    """Until the first has ended, even by a kill."""
    code = (
        "import sys, time; from pathlib import Path; from openppo.strategy.checkpoint import CheckpointFolder; "
        "from openppo.types import SingleProcess; folder = CheckpointFolder(Path(sys.argv[1]), SingleProcess(), 3); "
        "print('holds it', flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "holds it\n"
            with pytest.raises(ValueError, match=rf"--ckpt_path .*another run writes there \(process {other.pid} on"):
                folder_of(tmp_path)
        finally:
            other.kill()
    folder_of(tmp_path).save(1, write("one"))


def test_what_cannot_be_moved_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point: its neighbour is another disk."""
    folder = folder_of(tmp_path / "c")
    for step in (1, 2):
        folder.save(step, write("text"))
    before, real = names(tmp_path / "c"), Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == "step_00000002" and target.parent.name == "c.1":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(ValueError, match="cannot be set aside"):
            folder.set_aside()
    assert names(tmp_path / "c") == before
    assert names(tmp_path) == ["c"]


def test_nothing_is_replaced_by_an_older_save_because_the_newer_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    folder.save(4, write("old"))
    monkeypatch.setattr(CheckpointFolder, "_remove_replaced", lambda self: None)
    folder.save(4, write("new"))
    real = io.open

    def open_or_fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(tmp_path / "step_00000004" / "manifest.json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", open_or_fail)
        with pytest.raises(ValueError, match="cannot be read"):
            folder.newest()
    assert (tmp_path / "step_00000004" / "a.txt").read_text() == "new"
