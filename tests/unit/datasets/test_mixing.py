"""Several sources in one data set, and loaders of the user's own."""

import json
import logging
from collections import Counter

import datasets
import pytest

from openppo.config import PPODataConfig, parse_probs
from openppo.datasets import load_mixed_rows, load_prompts

SIZES = {"a": 40, "b": 30, "c": 700}


@pytest.fixture
def sources(tmp_path):
    """Three files of numbered rows."""
    for name, size in SIZES.items():
        lines = [json.dumps({"input": f"{name}{number}"}) for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return ",".join(str(tmp_path / f"{name}.jsonl") for name in SIZES)


def mix(sources, probs, seed=42, max_samples=None, **options):
    pairs = parse_probs(sources, probs, "prompt_data")
    return load_mixed_rows(pairs, flag="--prompt_data", split="train", max_samples=max_samples, seed=seed, **options)


def texts(rows):
    return [row.row["input"] for row in rows]


def test_without_shares_all_rows_follow_one_another_with_source_and_number(sources):
    rows = mix(sources, None)
    assert texts(rows) == [f"{name}{number}" for name, size in SIZES.items() for number in range(size)]
    assert [(row.source, row.number) for row in rows[39:41]] == [
        (sources.split(",")[0], 40),
        (sources.split(",")[1], 1),
    ]


@pytest.mark.parametrize("seed", [0, 42])
@pytest.mark.parametrize("probs", ["0.5,0.2,0.3", "1,1,2000", "8,1,1"])
def test_with_shares_the_rows_are_those_of_interleave_datasets(sources, probs, seed):
    shares = [share for _, share in parse_probs(sources, probs, "prompt_data")]
    made = [datasets.Dataset.from_dict({"input": [f"{n}{i}" for i in range(size)]}) for n, size in SIZES.items()]
    expected = datasets.interleave_datasets(made, shares, seed=seed, stopping_strategy="first_exhausted")
    assert texts(mix(sources, probs, seed)) == expected["input"]


def test_shares_are_kept_until_the_first_source_is_used_up(sources):
    rows = mix(sources, "0.1,0.1,0.8")
    counts = Counter(row.row["input"][0] for row in rows)
    assert any(counts[name] == size for name, size in SIZES.items())
    assert all(counts[name] <= size for name, size in SIZES.items())
    assert counts["c"] / len(rows) == pytest.approx(0.8, abs=0.05)


def test_max_samples_is_of_each_source(sources):
    assert texts(mix(sources, None, max_samples=2)) == ["a0", "a1", "b0", "b1", "c0", "c1"]


def test_prompts_keep_the_source_and_errors_name_it(sources, tokenizer):
    rows = mix(sources, None, max_samples=1)
    loaded = load_prompts(rows, tokenizer, PPODataConfig(sources))
    assert [prompt.source for prompt in loaded.prompts] == sources.split(",")
    rows[1].row["input"] = 3
    with pytest.raises(ValueError, match=r"--prompt_data, row 1 of .*b\.jsonl \(line 1\): not a text but int"):
        load_prompts(rows, tokenizer, PPODataConfig(sources))


def test_copies_are_counted_and_kept(tmp_path, caplog):
    caplog.set_level(logging.INFO, "openppo")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"input": "x"}\n{"input": "y"}\n{"input": "x"}\n')
    assert texts(mix(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", None)) == ["x", "y", "x"] * 2
    assert caplog.messages == ["--prompt_data: 4 of 6 rows are copies of others; they are kept"]


LOADERS = """
class Rows:
    def __init__(self, source):
        self.source = source
    def __iter__(self):
        return iter({"input": f"{self.source}{number}"} for number in range(3))

def rows(source):
    yield from Rows(source)

def number(source):
    return 3

def texts(source):
    return [source]

def nothing(source):
    return []
"""


@pytest.fixture
def loaders(tmp_path):
    """A Python file with loaders, good and bad."""
    path = tmp_path / "loaders.py"
    path.write_text(LOADERS)
    return path


@pytest.mark.parametrize("name", ["Rows", "rows"])
def test_a_class_or_function_of_the_users_gives_the_rows_of_each_source(loaders, name):
    rows = mix("x,y", None, max_samples=2, dataset_class=f"{loaders}:{name}")
    assert texts(rows) == ["x0", "x1", "y0", "y1"]
    assert [row.source for row in rows] == ["x", "x", "y", "y"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "called for --prompt_data x, gave int; it must give rows"),
        ("texts", "gave rows of str; each must be a dict"),
        ("nothing", "gave no rows"),
        ("other", "has no function 'other'. It has: Rows, nothing, number, rows, texts"),
        ("", "give a Python file and a name in it, path.py:name"),
    ],
)
def test_a_loader_that_does_not_work_is_an_error(loaders, name, message):
    with pytest.raises(ValueError, match=f"--dataset_class .*{message}"):
        mix("x", None, dataset_class=f"{loaders}:{name}")


@pytest.mark.parametrize(
    ("code", "message"), [(None, "no such file"), ("import not_there", "cannot be imported"), ("(", "cannot be imp")]
)
def test_a_loader_that_cannot_be_imported_is_an_error(tmp_path, code, message):
    path = tmp_path / "broken.py"
    if code is not None:
        path.write_text(code)
    with pytest.raises(ValueError, match=f"--dataset_class .*broken.py:rows: {message}"):
        mix("x", None, dataset_class=f"{path}:rows")
