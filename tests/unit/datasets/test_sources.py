"""Rows from files, saved folders, the hub, several sources and the user's own loaders; errors name file and place."""

import csv
import gzip
import json
import logging
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from openppo.config import RowsConfig, parse_probs
from openppo.datasets import load_mixed_rows, sources

ROWS = [
    {"text": 'zwei,\n"drei" \u2028 é', "messages": [{"role": "user", "content": "a"}], "n": 1},
    {"text": "", "messages": [], "n": 2},
    {
        "text": "c",
        "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
        "n": 3,
    },
]


def load(source, split="train", max_samples=None):
    rows = sources.load_rows(
        str(source), flag="--prompt_data", split=split, max_samples=max_samples
    )
    return [row.row for row in rows]


def write_jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def write_parquet(path, table=None, **options):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS) if table is None else table, path, **options
    )
    return path


def as_gzip(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


@pytest.mark.parametrize(
    ("name", "write"),
    [
        *((name, write_jsonl) for name in ("rows.jsonl", "ROWS.JSONL", "lines.json")),
        *((name, write_parquet) for name in ("we[1]rd *.parquet", "a::b.parquet")),
        ("array.json", lambda path: path.write_text("\n " + json.dumps(ROWS, indent=2))),
        ("saved", datasets.Dataset.from_list(ROWS).save_to_disk),
    ],
)
def test_every_format_keeps_order_types_and_nested_values(tmp_path, name, write):
    source = tmp_path / name
    write(source)
    assert load(source) == load(source, max_samples=100) == ROWS
    assert load(source, max_samples=2) == ROWS[:2]
    if "json" in name.lower():
        assert load(as_gzip(source)) == ROWS
        source.write_text('{"a": 1}')
        assert load(source) == [{"a": 1}], "an edited file is never served stale"


def test_json_values_are_kept_as_written(tmp_path):
    """As ``datasets`` would not: dates, whole numbers beside fractions, large numbers, different columns."""
    rows = [
        {"a": 1, "d": "2020-01-01"},
        {"b": [1, "x", {"y": None}]},
        {"a": 1.5},
        {"a": "text"},
        {"a": 2**70},
    ]
    assert list(map(repr, load(write_jsonl(tmp_path / "rows.jsonl", rows)))) == list(
        map(repr, rows)
    )
    for name, text in (
        ("rows.jsonl", b'{"a": 1}\r\n\r\n{"a": 2}'),
        ("rows.json", b'\n[{"a": 1},\n{"a": 2}]'),
    ):
        (tmp_path / name).write_bytes(
            b"\xef\xbb\xbf" + text
        )  # byte order mark and blank lines do not matter
        assert load(tmp_path / name) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_csv_with_another_separator_is_read_and_said(tmp_path, caplog, separator):
    caplog.set_level(logging.INFO)
    path = tmp_path / "rows.csv"
    path.write_text(f'question{separator}answer\n"one, two{separator}"{separator}3\n')
    assert load(path) == [{"question": f"one, two{separator}", "answer": "3"}]
    assert f"columns are separated by {separator!r}" in caplog.text


COLUMNS = {"question": ["a", "b"], "answer": [1, None]}
OBJECTS = [{"question": "a", "answer": 1}, {"question": "b", "answer": None}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (COLUMNS, "each of its values is a column, of 2 rows"),
        (
            {name: dict(zip("01", values, strict=True)) for name, values in COLUMNS.items()},
            "is a column, of 2 rows",
        ),
        ({"version": "1.1", "data": OBJECTS}, "its rows are those of 'data'"),
    ],
    ids=["lists", "objects", "data"],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_of_columns_or_data_has_their_rows(tmp_path, caplog, content, said, indent):
    caplog.set_level(logging.INFO)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content, indent=indent))
    assert load(path) == OBJECTS
    assert said in caplog.text


def test_an_object_of_one_row_stays_a_row(tmp_path):
    for content in (
        {"messages": [{"role": "user", "content": "a"}]},
        {"prompt": "a", "data": [1]},
        {"a": ["b"], "c": "d"},
    ):
        (tmp_path / "row.json").write_text(json.dumps(content))
        assert load(tmp_path / "row.json") == [content]


def test_csv_values_are_strings_with_commas_quotes_and_newlines(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "n"], ['a, "b"\nc', "007"], ["", "x" * 200_000]])
    expected = [{"text": 'a, "b"\nc', "n": "007"}, {"text": "", "n": "x" * 200_000}]
    assert load(path) == load(as_gzip(path)) == expected


def test_a_folder_gives_the_rows_of_the_split_or_an_error(tmp_path):
    splits = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    files = tmp_path / "files"
    files.mkdir()
    for name, rows in (
        ("train-00001", ROWS[1:]),
        ("train-00000", ROWS[:1]),
        ("harmless-test", ROWS[:1]),
    ):
        write_jsonl(files / f"{name}.jsonl", rows)
    (files / "README.md").write_text("about")
    for folder in (tmp_path / "saved", files):
        assert (load(folder, split="train"), load(folder, split="test")) == (ROWS, ROWS[:1])
        with pytest.raises(
            ValueError, match=r"^--prompt_data .*no split 'dev'. .* test, train.*--prompt_split"
        ):
            load(folder, split="dev")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="^--prompt_data .*no data file in this folder"):
        load(tmp_path)
    (tmp_path / "data").mkdir()  # files without a split in their name are train
    write_jsonl(tmp_path / "data" / "contest.jsonl", ROWS[:1])
    (tmp_path / "data" / "other.jsonl").write_text('\n\n{"text": "d"}\n')
    assert load(tmp_path) == [ROWS[0], {"text": "d"}]
    for name in ("a.jsonl", "b.csv"):
        (tmp_path / name).write_text("")
    with pytest.raises(
        ValueError, match=r"^--prompt_data .*several kinds for split 'train' \(a.jsonl, b.csv\)"
    ):
        load(tmp_path)


def test_a_name_that_is_not_a_path_is_loaded_from_the_hub(monkeypatch):
    asked = []

    def fake(name, configuration, split):
        asked.append((name, configuration, split))
        if split == "dev":
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(sources, "load_dataset", fake)
    assert load("owner/name", split="train[:9]", max_samples=1) == ROWS[:1]
    with pytest.raises(
        ValueError, match=r"--prompt_data owner/name@main: no such file .* split 'dev' .*no network"
    ):
        load("owner/name@main", split="dev")
    monkeypatch.setattr(sources.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="HF_HUB_OFFLINE is set: unset it, or name a folder that save_to_disk"
    ):
        load("owner/name@main", split="dev")
    monkeypatch.undo()
    for path in (
        "no/such/file.jsonl",
        "./nowhere",
        "missing.json",
        "/no/folder",
    ):  # which are not looked up
        with pytest.raises(
            ValueError, match=r"--prompt_data .*no such file or folder.*not a name on the hub"
        ):
            load(path)
    assert asked == [("owner/name", None, "train[:9]"), *[("owner/name", "main", "dev")] * 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n\n{"a": \n',
            r"a.jsonl, line 3: not valid JSON \(Expecting value at column 6\)",
        ),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl, line 2: not an object but list"),
        ("a.json", '[{"a": 1},\n {"a": }]', "a.json, line 2: not valid JSON"),
        ("a.json", '[{"a": 1}, "x"]', "a.json, row 2: not an object but str"),
        ("a.json", "[]", "a.json: empty, it has no rows"),
        ("a.csv", "x,y\n1,2\n\n3\n", "a.csv, line 4: 1 fields, but the first line names 2 columns"),
        ("a.csv", "x,x\n1,2\n", "a.csv, line 1: a column occurs twice"),
        ("a.csv", 'x\n"1', "a.csv, line 2: not valid CSV"),
        ("a.parquet", "no table", "a.parquet: cannot be read as Parquet"),
        (
            "a.jsonl",
            '{"a": 1}\n{"a":' + "9" * 5000 + "}\n",
            "a.jsonl, line 2: not valid JSON .*4300 digits",
        ),
        (
            "a.jsonl",
            '{"a": 1}\n{"a":' + "[" * 100_000 + "\n",
            "a.jsonl, line 2: not valid JSON .*recursion",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 9, mtime=0)[:-12],
            "a.jsonl.gz: cannot be read .*whole",
        ),
        ("a.txt", "text", r"a.txt: unknown kind of file. Use .jsonl, .json or .csv"),
        (
            "a.jsonl",
            b'{"a": 1}\r\n{"a": "caf\xe9"}\r\n',
            r"a.jsonl: not UTF-8 text .* byte 0xe9 .* Save the file",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}\n{"a": "caf\xe9"}\n', mtime=0),
            "a.jsonl.gz: not UTF-8 text",
        ),
    ],
)
def test_a_malformed_file_is_an_error_that_names_flag_file_and_place(
    tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"--prompt_data .*{message}"):
        load(tmp_path / name)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite(path):
    content = path.read_bytes()
    path.write_bytes(content[:50] + b"\xff" * 50 + content[100:])


def change_a_letter(path):
    path.write_bytes(path.read_bytes().replace(b"a text, number 7", b"a test, number 7"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("a.parquet", damage) for damage in (cut, overwrite, change_a_letter)),
        *(("saved", damage) for damage in (cut, overwrite, Path.unlink)),
    ],
)
def test_a_damaged_file_or_folder_is_one_error(tmp_path, name, damage, capfd, caplog):
    data = datasets.Dataset.from_list([{"text": f"a text, number {n}"} for n in range(100)])
    if name == "saved":
        data.save_to_disk(tmp_path / name)
    else:
        options = {
            "write_page_checksum": damage is change_a_letter,
            "use_dictionary": False,
            "compression": "none",
        }
        write_parquet(tmp_path / name, data.data.table, **options)
    damage(next(tmp_path.glob("saved/*.arrow"), tmp_path / name))
    capfd.readouterr()
    with pytest.raises(ValueError, match=f"^--prompt_data .*{name}: .*cannot be read"):
        load(tmp_path / name)
    assert (capfd.readouterr(), caplog.messages) == (("", ""), [])


def test_a_date_that_python_cannot_hold_is_an_error(tmp_path):
    table = pyarrow.table(
        {"column": pyarrow.array([10**15], pyarrow.int64()).view(pyarrow.timestamp("ms"))}
    )
    write_parquet(tmp_path / "a.parquet", table)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for source in ("a.parquet", "saved"):
        with pytest.raises(
            ValueError, match=f"--prompt_data .*{source}: .*cannot be read .* as text"
        ):
            load(tmp_path / source)


SIZES = {"a": 40, "b": 30, "c": 700}


@pytest.fixture
def files(tmp_path):
    """Three files of numbered rows."""
    for name, size in SIZES.items():
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{"input": f"{name}{number}"} for number in range(size)]
        )
    return ",".join(str(tmp_path / f"{name}.jsonl") for name in SIZES)


def mix(source, probs, seed=42, **options):
    return load_mixed_rows(
        RowsConfig(**options), source, probs, flag="--prompt_data", split="train", seed=seed
    )


def texts(rows):
    return [row.row["input"] for row in rows]


def test_without_shares_all_rows_follow_one_another_with_source_and_number(files):
    rows, (first, second, _) = mix(files, None), files.split(",")
    assert texts(rows) == [
        f"{name}{number}" for name, size in SIZES.items() for number in range(size)
    ]
    assert [(row.source, row.number) for row in rows[39:41]] == [(first, 40), (second, 1)]
    assert texts(mix(files, None, max_samples=2)) == ["a0", "a1", "b0", "b1", "c0", "c1"], (
        "of each source"
    )
    assert len(mix(f"{first},{first}", None)) == 80


@pytest.mark.parametrize(
    ("probs", "seed"), [("0.5,0.2,0.3", 0), ("1,1,2000", 42), ("8,1,1", 42), ("0.1,0.1,0.8", 0)]
)
def test_with_shares_rows_are_drawn_until_the_first_source_is_used_up(files, probs, seed):
    """With the draws of OpenRLHF, which are those of numpy's generator in blocks of 1,000."""
    shares = [share for _, share in parse_probs(files, probs, "prompt_data")]
    draws = np.random.default_rng(seed)
    names = ["abc"[choice] for _ in range(3) for choice in draws.choice(3, size=1000, p=shares)]
    numbered = [(name, names[:i].count(name)) for i, name in enumerate(names)]
    end = next(i for i, (name, number) in enumerate(numbered) if number == SIZES[name] - 1)
    assert texts(mix(files, probs, seed)) == [
        f"{name}{number}" for name, number in numbered[: end + 1]
    ]


LOADERS = """
class Rows(list):
    def __init__(self, source):
        super().__init__({"input": f"{source}{number}"} for number in range(3))

rows, texts, nothing = (lambda source: iter(Rows(source))), list, lambda source: []
"""


def test_a_class_or_function_of_the_users_gives_the_rows_of_each_source(tmp_path):
    (tmp_path / "loaders.py").write_text(LOADERS)
    for name in ("Rows", "rows"):
        rows = mix("x,y", None, max_samples=2, dataset_class=f"{tmp_path}/loaders.py:{name}")
        assert [(row.source, row.row["input"]) for row in rows] == [
            ("x", "x0"),
            ("x", "x1"),
            ("y", "y0"),
            ("y", "y1"),
        ]
    for name in ("texts", "nothing"):
        with pytest.raises(
            ValueError,
            match=f"^--dataset_class .*:{name}, called for --prompt_data x, must give one",
        ):
            mix("x", None, dataset_class=f"{tmp_path}/loaders.py:{name}")
