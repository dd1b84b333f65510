"""Every format round trip, and every error message of loading."""

import csv
import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from openppo.config import PPODataConfig, PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_documents,
    load_preferences,
    load_process_examples,
    load_prompts,
    load_rows,
    load_sft_examples,
    loading,
    number_rows,
    require_column,
)

ROWS = [
    {"text": 'zwei,\n"drei" \u2028 é', "messages": [{"role": "user", "content": "a"}], "n": 1},
    {"text": "", "messages": [], "n": 2},
    {"text": "c", "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], "n": 3},
]


def load(source, split="train", max_samples=None):
    rows = load_rows(str(source), flag="--prompt_data", split=split, max_samples=max_samples)
    return [row.row for row in rows]


def write_jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def as_gzip(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.fixture
def no_hub(monkeypatch):
    """The hub cannot be reached; returns the names that were asked for."""
    asked = []

    def refuse(name, configuration, split):
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr(loading, "load_dataset", refuse)
    return asked


def test_jsonl_rows_keep_order_and_types(tmp_path):
    assert load(write_jsonl(tmp_path / "rows.jsonl")) == ROWS


def test_json_array_and_json_lines_hold_the_same_rows(tmp_path):
    array = tmp_path / "array.json"
    array.write_text("\n " + json.dumps(ROWS, indent=2))
    assert load(array) == load(write_jsonl(tmp_path / "lines.json")) == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "ROWS.JSONL"])
def test_packed_files_hold_the_same_rows(tmp_path, name):
    assert load(as_gzip(write_jsonl(tmp_path / name))) == ROWS


def test_byte_order_mark_and_blank_lines_do_not_matter(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert load(path) == [{"a": 1}, {"a": 2}]


def test_rows_of_one_file_may_have_different_columns(tmp_path):
    rows = [{"a": 1}, {"b": [1, "x"]}, {"a": "text"}]
    assert load(write_jsonl(tmp_path / "rows.jsonl", rows)) == rows


def test_csv_values_are_strings_with_commas_quotes_and_newlines(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([["text", "n"], ['a, "b"\nc', 1], ["", "x" * 200_000]])
    expected = [{"text": 'a, "b"\nc', "n": "1"}, {"text": "", "n": "x" * 200_000}]
    assert load(path) == load(as_gzip(path)) == expected


def test_parquet_rows_keep_nested_values(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert load(path) == ROWS


def test_folder_saved_by_datasets_holds_the_same_rows(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved", split="ignored") == ROWS


def test_folder_of_splits_saved_by_datasets_gives_the_split(tmp_path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved", split="train") == ROWS
    assert load(tmp_path / "saved", split="test") == ROWS[:1]
    with pytest.raises(ValueError, match=r"--prompt_data .*no split 'dev'.*are test, train.*--prompt_split"):
        load(tmp_path / "saved", split="dev")


def test_folder_of_files_gives_the_files_of_the_split_by_name(tmp_path):
    write_jsonl(tmp_path / "train-00001.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "train-00000.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "harmless-test.jsonl", ROWS[2:])
    (tmp_path / "README.md").write_text("about")
    assert load(tmp_path, split="train") == ROWS
    assert load(tmp_path, split="test") == ROWS[2:]
    with pytest.raises(ValueError, match=r"no split 'validation'. Its splits are test, train"):
        load(tmp_path, split="validation")


def test_files_without_a_split_in_their_name_are_train(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "contest.jsonl")
    assert load(tmp_path, split="train") == ROWS


def test_max_samples_takes_the_first_rows_of_every_format(tmp_path):
    lines, table, saved = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "a.parquet", tmp_path / "saved"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    datasets.Dataset.from_list(ROWS).save_to_disk(saved)
    assert load(lines, max_samples=2) == load(table, max_samples=2) == load(saved, max_samples=2) == ROWS[:2]
    assert load(saved, max_samples=100) == ROWS


def test_an_edited_file_is_never_served_stale(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl")
    load(path)
    assert load(write_jsonl(path, ROWS[:1])) == ROWS[:1]


def test_a_name_that_is_no_path_is_loaded_from_the_hub(monkeypatch):
    asked = {}

    def fake(name, configuration, split):
        asked.update(name=name, configuration=configuration, split=split)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(loading, "load_dataset", fake)
    assert load("owner/name", split="train[:9]", max_samples=1) == ROWS[:1]
    assert asked == {"name": "owner/name", "configuration": None, "split": "train[:9]"}
    assert load("owner/name@main") == ROWS
    assert (asked["name"], asked["configuration"]) == ("owner/name", "main")


@pytest.mark.parametrize("source", ["no/such/file.jsonl", "./nowhere", "missing.json", "/no/folder"])
def test_a_missing_path_is_an_error_without_asking_the_hub(no_hub, source):
    with pytest.raises(
        ValueError, match=r"--prompt_data .*no such file or folder, and no data set of that name could be loaded"
    ):
        load(source)
    assert no_hub == []


def test_a_name_the_hub_cannot_give_is_an_error_that_says_both(no_hub):
    with pytest.raises(
        ValueError, match=r"--prompt_data owner/name: no such file or folder, and no data set .*ConnectionError: no net"
    ):
        load("owner/name")
    assert no_hub == ["owner/name"]


def test_a_split_the_hub_does_not_have_is_an_error_with_its_splits(monkeypatch):
    def refuse(name, configuration, split):
        raise ValueError(f"Unknown split \"{split}\". Should be one of ['test'].")

    monkeypatch.setattr(loading, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"--prompt_data owner/name: split 'dev' .*Should be one of \['test'\]"):
        load("owner/name", split="dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', r"a.jsonl, line 3: not valid JSON \(Expecting value at column 6\)"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl, line 2: not an object but list"),
        ("a.json", '[{"a": 1},\n {"a": }]', "a.json, line 2: not valid JSON"),
        ("a.json", '[{"a": 1}, "x"]', "a.json, row 2: not an object but str"),
        ("a.json", '{\n "a": 1\n}', "a.json, line 1: not valid JSON .*array of objects"),
        ("a.jsonl", "", "a.jsonl: empty, it has no rows"),
        ("a.json", "[]", "a.json: empty, it has no rows"),
        ("a.csv", "", "a.csv: empty, it has no rows"),
        ("a.csv", "x,y\n", "a.csv: empty, it has no rows"),
        ("a.csv", "x,y\n1,2\n\n3\n", "a.csv, line 4: 1 fields, but the first line names 2 columns"),
        ("a.csv", "x,x\n1,2\n", "a.csv, line 1: column 'x' occurs twice"),
        ("a.csv", 'x\n"1', "a.csv, line 2: not valid CSV"),
        ("a.parquet", "no table", "a.parquet, from row 1 on: not a whole Parquet file"),
        ("a.parquet", "", "a.parquet, from row 1 on: not a whole Parquet file"),
        (
            "a.jsonl",
            '{"a": 1}\n{"a": ',
            "a.jsonl, line 2: not valid JSON .*The file ends in this line",
        ),
        ("a.jsonl", '{"a": 1}\n{"a":' + "9" * 5000 + "}\n", "a.jsonl, line 2: not valid JSON .*4300 digits"),
        ("a.jsonl", '{"a": 1}\n{"a":' + "[" * 100_000 + "\n", "a.jsonl, line 2: not valid JSON .*recursion"),
        ("a.json", "[" * 100_000, "a.json: not valid JSON .*recursion"),
        ("a.jsonl", '{"a": 1}\n{"b": 1, "b": 2}\n', "a.jsonl, line 2: not valid JSON .'b' occurs twice in an object"),
        ("a.jsonl", "\0" * 100, "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl.gz", "not packed", "a.jsonl.gz: cannot be read"),
        ("a.txt", "text", r"a.txt: unknown kind of file. Use .jsonl, .json or .csv"),
        ("a.jsonl", b'{"a": "\xff"}', r"a.jsonl, line 1: not UTF-8 text \(byte 0xff: invalid start byte\)"),
        ("a.jsonl", b'{"a": 1}\r\n{"a": "caf\xe9"}\r\n', "a.jsonl, line 2: not UTF-8 text .* Save the file as UTF-8"),
        ("a.json", b'[{"a": 1},\n\n{"a": "caf\xe9"}]', "a.json, line 3: not UTF-8 text"),
        ("a.csv", b"x\na\ncaf\xe9\n", "a.csv, line 3: not UTF-8 text"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "a.jsonl, line 1: not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n{"a": "caf\xe9"}\n', mtime=0), "a.jsonl.gz, line 2: not UTF-8 text"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_flag_file_and_place(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"--prompt_data .*{message}"):
        load(path)


def test_a_cut_gzip_file_is_an_error(tmp_path):
    path = as_gzip(write_jsonl(tmp_path / "a.jsonl"))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"a.jsonl.gz: cannot be read .*whole"):
        load(path)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path):
    content = path.read_bytes()
    path.write_bytes(content[:50] + b"\xff" * 50 + content[100:])


@pytest.mark.parametrize("compression", ["none", "snappy"])
@pytest.mark.parametrize("damage", [cut, overwrite])
def test_a_damaged_parquet_file_is_an_error(tmp_path, compression, damage):
    table = pyarrow.Table.from_pylist([{"text": f"a text, number {n}"} for n in range(100)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression=compression)
    damage(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="--prompt_data .*a.parquet, from row 1 on: not a whole Parquet"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([10**18], pyarrow.timestamp("us")),
        ([10**15], pyarrow.timestamp("ms")),
        ([10**8], pyarrow.date32()),
        ([2**62], pyarrow.duration("s")),
        ([0], pyarrow.timestamp("s", tz="Nowhere/None")),
    ],
    ids=str,
)
def test_a_date_that_python_cannot_hold_is_an_error_naming_the_column(tmp_path, values, kind):
    table = pyarrow.table({"input": ["a"], "when": pyarrow.array(values, pyarrow.int64()).cast(pyarrow.int64())})
    whole = pyarrow.array(values, pyarrow.int32() if kind == pyarrow.date32() else pyarrow.int64()).view(kind)
    table = table.set_column(1, "when", whole)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"--prompt_data .*a.parquet, from row 1 on: column 'when' .* of type .*Leave"):
        load(tmp_path / "a.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"--prompt_data .*saved: a folder .* that cannot be read .* as text"):
        load(tmp_path / "saved")


def test_a_column_that_occurs_twice_in_a_parquet_file_is_an_error(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["input", "input"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: column 'input' occurs twice. Rename one of them"):
        load(tmp_path / "a.parquet")


def test_bytes_that_are_no_text_in_a_parquet_file_are_an_error(tmp_path):
    buffers = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).buffers()
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet, from row 1 on: .*column 0.*Invalid UTF8"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.arrow", Path.unlink),
        ("*.arrow", cut),
        ("*.arrow", overwrite),
        ("state.json", lambda path: path.write_text("{")),
        ("state.json", lambda path: path.write_text("{}")),
        ("dataset_info.json", lambda path: path.write_text("{")),
    ],
)
def test_a_damaged_saved_folder_is_an_error(tmp_path, pattern, damage):
    datasets.Dataset.from_list(ROWS * 9).save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").glob(pattern):
        damage(file)
    with pytest.raises(ValueError, match=r"--prompt_data .*saved by 'datasets' that cannot be read"):
        load(tmp_path / "saved")


def test_a_damaged_list_of_splits_is_an_error(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--prompt_data .*saved by 'datasets' that cannot be read"):
        load(tmp_path / "saved")


def test_a_row_knows_its_file_and_line(tmp_path):
    write_jsonl(tmp_path / "train-0.jsonl", ROWS[:2])
    (tmp_path / "train-1.jsonl").write_text('\n\n{"text": "d"}\n')
    rows = load_rows(str(tmp_path), flag="--prompt_data", split="train", max_samples=None)
    assert [row.place for row in rows] == ["train-0.jsonl, line 1", "train-0.jsonl, line 2", "train-1.jsonl, line 3"]
    with pytest.raises(ValueError, match=r"^--prompt_data, row 3 of .* \(train-1.jsonl, line 3\): no column 'n'"):
        require_column(rows, "n", flag_of_key="--input_key", flag_of_data="--prompt_data")


def test_a_row_of_several_lines_is_named_by_its_first(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"one\ntwo"\nthree\n')
    rows = load_rows(str(tmp_path / "a.csv"), flag="--prompt_data", split="train", max_samples=None)
    assert [row.place for row in rows] == ["line 2", "line 4"]


def test_an_empty_file_among_others_is_named(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").touch()
    assert load(tmp_path) == ROWS
    assert caplog.messages == [f"--prompt_data {tmp_path}/b.jsonl: empty, it has no rows"]


def test_a_folder_without_data_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no data file in this folder"):
        load(tmp_path)


def test_a_split_in_two_formats_is_an_error(tmp_path):
    write_jsonl(tmp_path / "train.jsonl")
    (tmp_path / "train.csv").write_text("a\n1\n")
    with pytest.raises(ValueError, match=r"files of several kinds for split 'train' \(train.csv, train.jsonl\)"):
        load(tmp_path)


def test_a_missing_column_is_an_error_with_row_columns_and_flag():
    rows = [{"question": "a", "answer": "b"}, {"answer": "b", "id": 1}]
    require_column(number_rows(rows), "answer", flag_of_key="--input_key", flag_of_data="--prompt_data")
    with pytest.raises(
        ValueError, match=r"--prompt_data, row 2: no column 'question'. Its columns are answer, id: .*--input_key"
    ):
        require_column(number_rows(rows), "question", flag_of_key="--input_key", flag_of_data="--prompt_data")


SUPERVISED = SupervisedConfig("model", "data.jsonl")
LOADERS = {
    "prompts": lambda *a, **how: load_prompts(*a, PPODataConfig("data.jsonl"), **how),
    "sft": lambda *a, **how: load_sft_examples(*a, SUPERVISED, SFTDataConfig(), **how),
    "pairs": lambda *a, **how: load_preferences(*a, SUPERVISED, PreferenceConfig(), **how),
    "steps": lambda *a, **how: load_process_examples(*a, SUPERVISED, ProcessConfig(placeholder_token="K"), **how),
    "documents": lambda *a, **how: load_documents(*a, "input", 9, **how),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_rows_are_shown_one_by_one_as_they_are_tokenized(tokenizer, kind):
    row = {"input": "ab", "output": "c", "prompt": "a", "chosen": "b", "rejected": "c", "steps": ["s"], "labels": ["+"]}
    row |= {"question": "a"} if kind == "steps" else {}
    shown = []

    def show(rows):
        for each in rows:
            yield each
            shown.append(each.number)

    LOADERS[kind](number_rows([row] * 3), tokenizer, show=show)
    assert shown == [1, 2, 3]
