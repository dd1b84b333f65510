"""Fragments that some ranks wrote are read by any other split of the same tensors."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from openppo.strategy.checkpoint import model_state
from openppo.strategy.checkpoint.model_state import Fragment, FragmentReader, write_fragments

TENSORS = {"a.weight": torch.arange(17.0), "b": torch.arange(100.0, 103.0)}


def split(tensors: dict[str, Tensor], ranks: int) -> list[dict[str, Fragment]]:
    """Each rank's part, of padded and equal length as in ZeRO-3; a short tensor leaves nothing for the last ranks."""
    parts: list[dict[str, Fragment]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        size = -(-len(tensor) // ranks)
        for rank in range(ranks):
            if len(tensor[rank * size : (rank + 1) * size]) > 0:
                parts[rank][name] = Fragment(rank * size, tensor[rank * size : (rank + 1) * size])
    return parts


def written(folder: Path, parts: list[dict[str, Fragment]]) -> list[Path]:
    files = [folder / f"{rank}.safetensors" for rank in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        write_fragments(file, part)
    return files


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 1), (4, 3), (5, 2), (5, 4)])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path, before, after):
    files = written(tmp_path, split(TENSORS, before))
    own = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    with FragmentReader(files) as reader:
        for part in split(own, after):
            for name, fragment in part.items():
                reader.read_into(name, fragment)
    assert all(own[name].equal(TENSORS[name]) for name in TENSORS)


def test_files_of_a_piece_at_most_hold_every_element_once(tmp_path, monkeypatch):
    monkeypatch.setattr(model_state, "PIECE_BYTES", 24)
    parts = split(TENSORS, 2)
    written(tmp_path, parts)
    names = ["0-00001", "0", "1-00001", "1"]  # 9 and 2 elements, 8 and 1
    assert sorted(file.stem for file in tmp_path.iterdir()) == sorted(names)
    held = [load_file(file) for file in tmp_path.iterdir()]
    assert all(4 * sum(map(len, file.values())) <= 24 for file in held)
    assert sum(len(values) for file in held for values in file.values()) == 20
    own = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
    with FragmentReader(tmp_path.iterdir()) as reader:
        for name, tensor in own.items():
            reader.read_into(name, Fragment(0, tensor))
    assert all(own[name].equal(TENSORS[name]) for name in TENSORS)


def test_missing_elements_are_counted_in_the_error(tmp_path):
    files = written(tmp_path, split(TENSORS, 2))[:1]
    with (
        FragmentReader(files) as reader,
        pytest.raises(ValueError, match="8 of 17 elements of a.weight are not in"),
    ):
        reader.read_into("a.weight", Fragment(0, torch.zeros(17)))


def test_fragments_are_as_open_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        (file,) = written(tmp_path, split(TENSORS, 1))
    finally:
        os.umask(before)
    assert oct(file.stat().st_mode & 0o777) == "0o640"
    assert list(tmp_path.iterdir()) == [file]
