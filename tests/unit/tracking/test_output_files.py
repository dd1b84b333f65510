"""Files that a command writes: nothing but an earlier output is replaced, and that whole or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from openppo.tracking.output_files import check_output_file, replacing


def is_ours(beginning: bytes) -> bool:
    return beginning.startswith(b"ours")


def checked(path: Path, *inputs: Path) -> Path:
    return check_output_file(
        str(path), "--output", is_ours=is_ours, inputs=[("--data", str(each)) for each in inputs]
    )


def test_an_earlier_output_and_an_empty_file_may_be_replaced(tmp_path):
    for name, text in (("new.txt", None), ("empty.txt", ""), ("earlier.txt", "ours, whole")):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert checked(tmp_path / name) == tmp_path / name
    assert checked(tmp_path / "folder" / "new.txt").parent.is_dir()
    assert not (tmp_path / "new.txt").exists(), "a check writes nothing"


def test_a_file_of_others_is_refused(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_fn(response): ...")
    (tmp_path / "link").symlink_to(tmp_path / "reward.py")
    for name in ("reward.py", "link"):
        with pytest.raises(
            ValueError,
            match=rf"^--output .*{name} holds what this command has not written: name anoth",
        ):
            checked(tmp_path / name)
    with pytest.raises(ValueError, match="is a folder: name a file in it"):
        checked(tmp_path)
    with pytest.raises(ValueError, match="cannot be written .*; choose another folder"):
        checked(tmp_path / "reward.py" / "new.txt")


def test_an_input_is_refused_by_any_name_though_it_is_an_earlier_output(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.txt").write_text("ours")
    (tmp_path / "link").symlink_to(tmp_path / "rows")
    monkeypatch.chdir(tmp_path)
    for output in ("rows/a.txt", "rows/new.txt", "link/a.txt", "rows/../rows/a.txt"):
        for source in ("rows", "link"):
            with pytest.raises(
                ValueError,
                match=f"^--output {output} is read by --data .*{source}: name another file",
            ):
                checked(Path(output), tmp_path / source)
    assert checked(Path("other.txt"), tmp_path / "rows", Path("no/such")) == Path("other.txt")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "out.txt"
    file.write_text("ours")
    with pytest.raises(RuntimeError, match="halfway"), replacing(file) as new:
        new.write_text("half")
        raise RuntimeError("halfway")
    assert file.read_text() == "ours"
    with replacing(file) as new:
        new.write_text("more")
        assert file.read_text() == "ours"
    assert file.read_text() == "more"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_modes_and_links_stay_and_new_files_have_the_usual_mode(tmp_path):
    (tmp_path / "usual").touch()
    (tmp_path / "kept").touch(mode=0o640)
    (tmp_path / "link").symlink_to("kept")
    for name in ("new", "kept", "link"):
        with replacing(tmp_path / name) as new:
            new.write_text(name)
    mode = {
        name: stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("usual", "new", "kept")
    }
    assert mode["new"] == mode["usual"]
    assert mode["kept"] == 0o640
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "kept").read_text() == "link"


def test_a_pipe_is_written_straight(tmp_path):
    pipe, texts = tmp_path / "pipe", []
    os.mkfifo(pipe)
    assert checked(pipe) == pipe
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    with replacing(pipe) as new:
        assert new == pipe
        new.write_text("ours")
    reader.join(timeout=10)
    assert texts == ["ours"]
    assert pipe.is_fifo()
    assert checked(Path(os.devnull)) == Path(os.devnull)
    with replacing(Path(os.devnull)) as new:
        new.write_text("ours")
    assert not Path(os.devnull).is_file()


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    file = checked(tmp_path / "folder" / "new.txt")
    file.parent.rmdir()
    with replacing(file) as new:
        new.write_text("ours")
    assert file.read_text() == "ours"
