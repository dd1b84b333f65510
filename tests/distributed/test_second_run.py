"""A second run into the folder of a first one loses nothing of it."""

import re
from collections.abc import Callable
from pathlib import Path


def test_a_second_run_keeps_the_model_of_the_first(tiny: Path, tmp_path: Path, launch: Callable[..., str]) -> None:
    command = f"""-m openppo.cli.train_sft --pretrain {tiny}/actor --dataset {tiny}/sft.jsonl --train_batch_size 13
        --learning_rate 1e-2 --save_path {tmp_path}/model""".split()
    launch(0, *command, "--max_steps", "1")
    first = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir() if file.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= first.keys()

    said = launch(0, *command, "--max_steps", "2")
    assert re.search("the model of an earlier run is kept in .*/model/model.1", said)
    kept = {file.name: file.read_bytes() for file in (tmp_path / "model" / "model.1").iterdir()}
    assert kept == first
    second = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert second != first["model.safetensors"]

    launch(0, *command, "--max_steps", "2", "--load_checkpoint")  # writes its own model again
    assert not (tmp_path / "model" / "model.2").exists()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == second
