"""generate and evaluate as users run them: alone or on two ranks, with the same lines and the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., str]
SAMPLED = "--n_samples_per_prompt 2 --temperature 0.9 --generate_max_len 7 --input_key input --label_key label"


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def close(line: dict[str, Any]) -> dict[str, Any]:
    return {name: pytest.approx(value, abs=1e-5) if type(value) is float else value for name, value in line.items()}


def test_two_ranks_write_the_lines_of_one(tiny: Path, tmp_path: Path, launch: Launch) -> None:
    arguments = f"--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl --max_samples 7 {SAMPLED}".split()
    launch(0, "-m", "openppo.cli.generate", *arguments, "--output_path", tmp_path / "one.jsonl")
    launch(2, "-m", "openppo.cli.generate", *arguments, "--output_path", tmp_path / "two.jsonl")
    one, two = lines_of(tmp_path / "one.jsonl"), lines_of(tmp_path / "two.jsonl")
    assert [(line["label"], line["sample"]) for line in one] == [(i, k) for i in range(7) for k in range(2)]
    assert two == [close(line) for line in one]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.jsonl", "two.jsonl"]
