"""A checkpoint is whole or not there; ranks are threads. Kills while saving are in tests/distributed."""

import errno
import io
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from openppo.strategy.checkpoint.folder import CheckpointError, CheckpointFolder
from openppo.types import SingleProcess
from tests.ranks import ThreadComm, on_ranks

STEP = "step_{:08d}".format


def write(text: str, name: str = "a.txt") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


TEXT = write("text")


def folder_of(
    path: Path, steps: int = 0, keep: int = 3, write: Callable[[Path], None] = TEXT
) -> Any:
    """A folder with checkpoints of the first ``steps`` steps."""
    folder = CheckpointFolder(path, SingleProcess(), keep)
    for step in range(1, steps + 1):
        folder.save(step, write)
    return folder


def names(path: Path) -> list[str]:
    """The entries of ``path`` without the lock."""
    return sorted({entry.name for entry in path.iterdir()} - {".lock"})


def test_only_the_newest_and_the_best_are_kept_and_found(tmp_path):
    folder = folder_of(tmp_path, keep=2)
    for step in (7, 3):
        folder.save_best(step, write(str(step)))
    assert folder.newest() is None, "the best is a model, no checkpoint"
    for step in (9, 10, 99_999_999, 100_000_000, 100_000_000):  # one of the same step is replaced
        folder.save(step, write(str(step)))
    assert names(tmp_path) == [
        "best",
        "best_step_00000003",
        "latest",
        "step_100000000",
        "step_99999999",
    ]
    assert folder_of(tmp_path).newest() == tmp_path / "step_100000000"
    assert [(tmp_path / link / "a.txt").read_text() for link in ("latest", "best")] == [
        "100000000",
        "3",
    ]
    shutil.copytree(
        tmp_path, tmp_path / "copy", symlinks=False
    )  # a folder in place of the link stops no save
    folder_of(tmp_path / "copy").save(100_000_001, write("text"))
    assert folder_of(tmp_path / "copy").newest() == tmp_path / "copy" / "step_100000001"


def test_a_folder_that_was_removed_is_made_again(tmp_path, caplog):
    path = tmp_path / "run" / "checkpoints"
    folder = folder_of(path, steps=1)
    for save in (folder.save, folder.save_best):
        shutil.rmtree(tmp_path / "run")
        caplog.clear()
        save(2, TEXT)
        assert f"--ckpt_path {path} was removed during the run: it is made again" in caplog.text
        assert (path / ".lock").is_file()
    folder.save(3, TEXT)
    assert names(path) == ["best", "best_step_00000002", "latest", STEP(3)]
    program = f"""
from openppo.strategy.checkpoint.folder import CheckpointFolder, Path
from openppo.types import SingleProcess
CheckpointFolder(Path({str(path)!r}), SingleProcess(), 1)
"""
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "another run writes there" in other.stderr, "it is locked again"


def test_a_rank_that_cannot_write_ends_the_save_on_all(tmp_path):
    def work(comm: ThreadComm) -> None:
        folder = CheckpointFolder(tmp_path, comm, keep=1)
        folder.save(1, write("one", f"{comm.rank}.txt"))

        def fail(path: Path) -> None:
            if comm.rank == 1:
                raise OSError(28, "No space left on device")
            (path / "0.txt").write_text("two")

        folder.save(2, fail)

    for error in on_ranks(2, work, (CheckpointError,)):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(f"--ckpt_path {tmp_path}: on rank 1 (")
        assert "No space left on device. Checkpoints that were there before are untouched." in str(
            error
        )
    assert names(tmp_path) == ["latest", STEP(1)]
    assert names(tmp_path / STEP(1)) == ["0.txt", "1.txt", "manifest.json"]


def write_both(path: Path) -> None:
    (path / "model").mkdir()
    for name in ("a.txt", "b.txt", "model/config.json"):
        (path / name).write_text("content")


def manifest(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "manifest.json").write_text(text)


DAMAGE: list[Callable[[Path], object]] = [
    write("conten", "b.txt"),  # cut
    write("bontent", "b.txt"),  # a bit has flipped
    lambda path: (path / "b.txt").unlink(),
    manifest('{"format": 1, "fil'),
    lambda path: (path / "manifest.json").unlink(),
    manifest("[]"),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_is_set_aside_for_the_previous(tmp_path, damage, ranks, caplog):
    folder_of(tmp_path, 2, write=write_both)
    damage(tmp_path / STEP(2))
    with caplog.at_level(logging.WARNING, "openppo"):
        found = on_ranks(ranks, lambda comm: CheckpointFolder(tmp_path, comm, keep=3).newest())
    assert found == [tmp_path / STEP(1)] * ranks
    assert "step_00000002 is damaged" in caplog.text
    assert names(tmp_path) == ["latest", STEP(1), STEP(2) + ".damaged.1"]
    assert (tmp_path / "latest").resolve() == tmp_path / STEP(1)


def delete(file: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / STEP(step) / file).unlink() for step in (1, 2)] and None


def version(number: int) -> Callable[[Path], object]:
    return lambda folder: manifest(f'{{"format": {number}, "files": {{}}}}')(folder / STEP(2))


UNREADABLE = "format {} is of another version of OpenPPO; this one reads 6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (delete("b.txt"), "all checkpoints there are damaged.*without --load_checkpoint"),
        (version(2), UNREADABLE.format(2)),
        (version(99), UNREADABLE.format(99)),
        (
            delete("model/config.json"),
            None,
        ),  # of the model nothing is read, so no change to it is damage
        (lambda folder: write("edited", "config.json")(folder / STEP(2) / "model"), None),
    ],
)
def test_without_a_whole_checkpoint_nothing_is_moved(tmp_path, change, message):
    folder = folder_of(tmp_path, 2, write=write_both)
    change(tmp_path)
    for _ in range(2):  # torchrun --max_restarts starts again with the same command
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            assert folder.newest() == tmp_path / STEP(2)
        assert names(tmp_path) == ["latest", STEP(1), STEP(2)]


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Permission denied"), OSError(errno.ESTALE, "Stale")]
)
@pytest.mark.parametrize("name", ["manifest.json", "a.txt"])
def test_an_unreadable_checkpoint_is_not_taken_for_damaged(tmp_path, name, error, monkeypatch):
    folder, real = folder_of(tmp_path, 2), io.open

    def open_or_fail(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file) == str(tmp_path / STEP(2) / name):
            raise error
        return real(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", open_or_fail)
        with pytest.raises(ValueError, match="step_00000002: cannot be read .*another --ckpt_path"):
            folder.newest()
    assert names(tmp_path) == ["latest", STEP(1), STEP(2)]
    assert folder.newest() == tmp_path / STEP(2)


@pytest.mark.parametrize("has_steps", [True, False])
def test_only_what_an_earlier_run_saved_is_set_aside(tmp_path, has_steps, caplog):
    """With --ckpt_path at or above --save_path models, logs and data are there too."""
    folder = folder_of(tmp_path / "c")
    folder.set_aside()
    assert names(tmp_path) == ["c"], "an empty folder stays"
    if has_steps:
        folder.save(4, write("four"))
    folder.save_best(3, write("three"))
    (tmp_path / "c" / "logs").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    folder_of(tmp_path / "c").set_aside()
    assert names(tmp_path / "c") == ["config.json", "logs"]
    assert names(tmp_path / "c.1") == [
        "best",
        "best_step_00000003",
        *["latest", STEP(4)] * has_steps,
    ]
    assert (tmp_path / "c.1" / "best" / "a.txt").read_text() == "three"
    assert f"of an earlier run are kept in {tmp_path}/c.1" in caplog.text
    assert ("--load_checkpoint would have resumed from them" in caplog.text) is has_steps


def test_a_folder_that_cannot_be_used_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    errors = on_ranks(2, lambda comm: CheckpointFolder(tmp_path / "file" / "x", comm, keep=1))
    assert all(
        "--ckpt_path" in str(error) and "choose another folder" in str(error) for error in errors
    )
    for host in "01":
        (tmp_path / host).mkdir()
    for error in on_ranks(
        4, lambda comm: CheckpointFolder(tmp_path / str(comm.rank // 2), comm, keep=3)
    ):
        assert isinstance(error, ValueError)
        assert str(error).startswith("on rank 2 (")
        assert "Several hosts need a shared --ckpt_path" in str(error)


HOLDS = """
import sys, time
from pathlib import Path
from openppo.strategy.checkpoint.folder import CheckpointFolder
from openppo.types import SingleProcess
folder = CheckpointFolder(Path(sys.argv[1]), SingleProcess(), 3)
print("holds it", flush=True)
time.sleep(300)
"""


def test_a_second_run_in_the_folder_is_refused_until_the_first_ends(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "holds it\n"
            with pytest.raises(
                ValueError,
                match=rf"--ckpt_path .*another run writes there \(process {other.pid} on",
            ):
                folder_of(tmp_path)
        finally:
            other.kill()
    folder_of(tmp_path).save(1, write("one"))
