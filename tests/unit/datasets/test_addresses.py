"""Rows at addresses of fsspec: the same as of local files, with errors that say what to install or check."""

import datasets
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from openppo.datasets import sources
from tests.unit.datasets.test_sources import ROWS, as_gzip, load, write_jsonl, write_parquet


@pytest.fixture
def remote(monkeypatch):
    """A file system in memory, empty."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return fsspec.filesystem("memory")


def test_files_and_folders_at_an_address_give_the_rows_of_local_ones(remote, tmp_path):
    files = [
        write_jsonl(tmp_path / "train-0.jsonl", ROWS[:1]),
        write_jsonl(tmp_path / "train-1.jsonl", ROWS[1:]),
    ]
    files += [
        as_gzip(files[0]),
        write_parquet(tmp_path / "rows.parquet"),
        write_jsonl(tmp_path / "test.jsonl"),
    ]
    (tmp_path / "rows.csv").write_text("a,b\n1,x\n")
    for file in [*files, tmp_path / "rows.csv"]:
        remote.put(str(file), f"/all/{file.name}")
        assert load(f"memory://all/{file.name}") == load(file)
    for file in (files[1], files[0], files[-1]):
        remote.put(str(file), f"/folder/{file.name}")
        remote.put(str(file), f"/hub/data/{file.name}")
    for folder in ("memory://folder", "memory://folder/", "memory://hub"):
        assert (load(folder), load(folder, split="test"), load(folder, max_samples=2)) == (
            ROWS,
            ROWS,
            ROWS[:2],
        )
    datasets.Dataset.from_list(ROWS).save_to_disk("memory://saved")
    assert load("memory://saved") == ROWS
    [row, *_] = sources.load_rows(
        "memory://folder", flag="--dataset", split="train", max_samples=None
    )
    assert (row.source, row.number) == ("memory://folder", 1)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "s3://bucket/rows.jsonl",
            "s3://bucket/rows.jsonl: reading s3:// needs s3fs: pip install s3fs",
        ),
        ("gs://bucket/rows", "gs://bucket/rows: reading gs:// needs gcsfs: pip install gcsfs"),
        (
            "s4://bucket/rows",
            "s4://bucket/rows: Protocol not known: s4. Use an address of fsspec, such as s3://",
        ),
        ("memory://no.jsonl", "memory://no.jsonl: no such file or folder.* Check the path"),
        ("memory://bad.jsonl", "memory://bad.jsonl, line 2: not valid JSON"),
        ("memory://bad.txt", "memory://bad.txt: unknown kind of file. Use .jsonl"),
        (
            "memory://folder",
            "memory://folder: no split 'train'. Its splits are test: choose one with --prompt_split",
        ),
        ("memory://u:secret@x.jsonl", r"memory://\*\*\*@x.jsonl: no such file or folder"),
    ],
)
def test_an_address_that_cannot_be_read_is_an_error_with_remedy(
    remote, monkeypatch, address, message
):
    """As where s3fs and gcsfs are not installed."""
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    for name in ("bad.jsonl", "bad.txt", "folder/test.jsonl"):
        remote.pipe(f"/{name}", b'{"a": 1}\n{"a"\n')
    with pytest.raises(ValueError, match=f"^--prompt_data {message}") as error:
        load(address)
    assert "secret" not in str(error.value)


def test_errors_of_a_network_name_address_and_remedy(remote, monkeypatch):
    class NoCredentialsError(Exception): ...

    def refuse(*_, **__):
        raise NoCredentialsError("who\nare you")

    remote.pipe("/a.jsonl", b"{}")
    monkeypatch.setattr(MemoryFileSystem, "open", refuse)
    with pytest.raises(
        ValueError,
        match=r"^--prompt_data memory://a.jsonl: cannot be read \(NoCredentialsError: who are you",
    ):
        load("memory://a.jsonl")
