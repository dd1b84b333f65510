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


def test_two_ranks_measure_what_one_measures(tiny: Path, tmp_path: Path, launch: Launch) -> None:
    (tmp_path / "more.jsonl").write_text('{"input": "cdc", "label": 3}\n')
    arguments = f"""--pretrain {tiny}/actor --prompt_data {tiny}/prompts.jsonl,{tmp_path}/more.jsonl --max_samples 6
        --reward_pretrain {tiny}/reward --pass_reward 0 --micro_batch_size 3 {SAMPLED}""".split()
    tables = []
    for ranks in (0, 2):
        out = tmp_path / f"{ranks}.jsonl"
        printed = launch(ranks, "-m", "openppo.cli.evaluate", *arguments, "--output_path", out)
        lines = printed.splitlines()
        tables.append(lines[next(i for i, line in enumerate(lines) if line.split()[:1] == ["all"]) :])
    assert tables[0] == tables[1]
    assert [line.split()[0] for line in tables[0][1:]] == [
        *("prompts", "reward", "reward_std", "pass@1", "pass@2", "response_length", "truncated_fraction")
    ]
    assert tables[0][1].split() == ["prompts", "7", "1", "6"]
    one, two = lines_of(tmp_path / "0.jsonl"), lines_of(tmp_path / "2.jsonl")
    for line in one:
        line["rewards"] = close(line["rewards"])
    assert two == [close(line) for line in one]
    assert {line["passed"] for line in one} == {True, False}
