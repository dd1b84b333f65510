"""Rows that are read although something in them is wrong are counted, and the log says so once."""

import json

import pytest

from openppo.config import RowsConfig
from openppo.datasets import load_mixed_rows
from tests.unit.datasets.loaders import WITH_CHAT, load, turns

TWICE = '{"prompt": "a", "prompt": "b", "n": {"x": 1, "x": 2, "x": 3}}\n'


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_the_last_of_equal_keys_is_read_and_rows_are_counted(tmp_path, name, caplog):
    path = tmp_path / name
    lines = ['{"prompt": "c"}\n', TWICE, TWICE]  # two objects each
    path.write_text("".join(lines) if name == "rows.jsonl" else f"[{','.join(lines)}]")

    def read(**options):
        rows = load_mixed_rows(
            RowsConfig(**options), str(path), flag="--dataset", split="train", seed=0
        )
        return [row.row for row in rows]

    row = {"prompt": "b", "n": {"x": 3}}
    assert read() == [{"prompt": "c"}, row, row]
    (line,) = caplog.messages
    assert (
        line
        == f"--dataset {path}: 4 objects have a key twice, the first 'x'; the last value is read"
    )
    if name == "rows.jsonl":
        caplog.clear()
        assert read(max_samples=2) == [{"prompt": "c"}, row]
        assert "2 objects have a key twice" in caplog.text
        caplog.clear()
        assert read(max_samples=1) == [{"prompt": "c"}]
        assert caplog.messages == []


VERL = {"prompt": turns(user="q"), "reward_model": {"style": "rule", "ground_truth": "1"}}


@pytest.mark.parametrize(
    "columns", [["reward_model"], ["prompt", "reward_model"], ["prompt", "reward_model", "n"]]
)
def test_rows_of_verl_with_json_texts_are_read_as_objects(tokenizer, columns):
    row = {**VERL, "n": {"a": 1}}
    texts = {**row, **{column: json.dumps(row[column]) for column in columns}}
    for data_format in ("auto", "verl"):
        (prompt,) = load("prompts", [texts], tokenizer, data_format=data_format, **WITH_CHAT)
        assert (prompt.text, prompt.label) == ("<bos><user>q<eos>\n<assistant>", "1")
        assert prompt.row == texts
    (prompt,) = load("prompts", [{**VERL, "reward_model": "null"}], tokenizer, **WITH_CHAT)
    assert prompt.label is None


def test_pairs_of_equal_sides_are_counted(tokenizer, caplog):
    caplog.set_level("INFO", "openppo")
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    load("pairs", [row, row], tokenizer)
    assert "equal" not in caplog.text
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    ranking = {"prompt": "a", "responses": ["b", "c", "b"]}
    assert len(load("pairs", [row, equal, equal, row], tokenizer)) == 4
    message = "--dataset: in 2 of 4 rows a better and a worse response are equal, which teaches nothing; first in row 2"
    assert [line for line in caplog.messages if "equal" in line] == [f"{message} of file"]
    caplog.clear()
    load("pairs", [ranking, {**ranking, "responses": ["b", "c"]}], tokenizer)
    assert "in 1 of 2 rows a better and a worse response are equal" in caplog.text
