"""Tokenization in several processes gives what one gives, and is done once for all who read the same rows."""

import datetime
import os

import datasets
import pytest

from openppo.build.row_loading import once_per_host
from openppo.config import PPODataConfig, SupervisedConfig
from openppo.datasets import tokenization
from openppo.types import SingleProcess
from tests.unit.datasets.loaders import ENDS_IN_EOS, WITH_CHAT, load, turns

CHAT = turns(user="ab", assistant="c")
ADD = {"type": "function", "function": {"name": "add"}}
TOOLS = [
    {"messages": turns(user="x" * n, assistant="c"), "tools": [ADD] if n % 2 else None}
    for n in range(1, 6)
]
PAIRS = [{"prompt": "a", "chosen": "b" * n, "rejected": "c", "m": n} for n in range(1, 8)]
STEPS = [
    {"input": "s K t K", "label": [0.25, 1]},
    {"input": "s K", "label": [0.5]},
    {"input": "u K", "label": [1]},
]
CASES = {
    "prompts": (
        "prompts",
        [{"question": "q" * n, "answer": n} for n in range(1, 9)],
        {},
        {"prompt_max_len": 7},
    ),
    "chats": ("prompts", [{"messages": CHAT, "label": "d"}] * 3, {}, WITH_CHAT),
    "tools": ("sft", TOOLS, {}, {"tools_key": "tools", **WITH_CHAT}),
    "sft": (
        "sft",
        [{"input": "a" * n, "output": "é\u2028"} for n in range(1, 6)],
        {},
        {"max_len": 8},
    ),
    "pairs": ("pairs", PAIRS, {"margin_key": "m"}, {}),
    "rankings": (
        "pairs",
        [{"prompt": "a", "responses": ["b", "c", "d"]}, {**PAIRS[0], "responses": ["b", "c"]}],
        {},
        {},
    ),
    "steps": ("steps", STEPS, {"placeholder_token": "K"}, {}),
    "documents": ("documents", [{"text": "ab" * n} for n in range(5)], {"max_len": 5}, {}),
}


@pytest.fixture
def renderings(tmp_path, monkeypatch):
    """The process of each row that is tokenized, with a cache of its own in which a file has three rows."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenization, "ROWS_AT_ONCE", 3)
    made, log = tokenization._Rendering._attributes, tmp_path / "renderings"

    def logged(self, fields):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return made(self, fields)

    monkeypatch.setattr(tokenization._Rendering, "_attributes", logged)
    log.touch()
    return lambda: log.read_text().split()


@pytest.fixture
def writes_tools(make_tokenizer):
    return make_tokenizer(bos=True, chat_template="{{ tools }}" + ENDS_IN_EOS)


def examples(name, tokenizer, processes):
    task, rows, columns, options = CASES[name]
    given = {"processes": processes} if task == "documents" else {}
    more = {} if task == "documents" else {**options, "dataset_num_proc": processes}
    return load(task, rows, tokenizer, {**columns, **given}, **more)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_and_the_cache_give_the_same_examples(
    name, writes_tools, renderings
):
    expected = examples(name, writes_tools, 0)
    assert (len(expected) > 1, renderings()) == (True, [])
    for processes in (2, 1):
        assert repr(examples(name, writes_tools, processes)) == repr(expected)
        assert len(renderings()) == len(CASES[name][1]), (
            "each row once, whatever the number of processes"
        )
    assert len(set(renderings())) > 1 and str(os.getpid()) not in renderings()


def test_whatever_changes_the_tokens_misses_the_cache(tokenizer, make_tokenizer, renderings):
    rows, counts = [{"messages": CHAT}], []
    for row, used, options in (
        (rows[0], tokenizer, WITH_CHAT),
        (rows[0], tokenizer, {**WITH_CHAT, "max_len": 50, "learning_rate": 0.5}),  # nothing new
        (rows[0], make_tokenizer(bos=True, chat_template=ENDS_IN_EOS), WITH_CHAT),
        ({"messages": turns(user="ab", assistant="d")}, tokenizer, WITH_CHAT),
        ({"input": "a", "output": "b"}, tokenizer, {}),
        ({"input": "a", "output": "b"}, tokenizer, {"input_template": "Q{}"}),
        ({"input": "a", "output": "b"}, make_tokenizer(bos=False), {"input_template": "Q{}"}),
    ):
        assert load("sft", [row], used, **options, dataset_num_proc=1) == load(
            "sft", [row], used, **options
        )
        counts.append(len(renderings()))
    assert counts == [1, 1, 2, 3, 4, 5, 6]


def test_errors_name_the_first_bad_row_as_one_process_does(tokenizer, renderings):
    rows = [{"input": "a"}, {"input": "b"}, {"input": ""}, {"input": 3}]
    for _ in range(2):
        with pytest.raises(ValueError, match="^--prompt_data, row 3 of file: the text is empty"):
            load("prompts", rows, tokenizer, dataset_num_proc=2)
    with pytest.raises(
        ValueError,
        match="row 1 of file: holds values that are not JSON's .*leave --dataset_num_proc out",
    ):
        load(
            "prompts",
            [{"question": "a", "answer": datetime.date(2020, 1, 1)}],
            tokenizer,
            dataset_num_proc=2,
        )


def test_a_cache_that_cannot_be_written_is_an_error_with_remedy(tokenizer, renderings, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        ValueError,
        match="^--dataset_num_proc: the cache .* cannot be used .*with HF_DATASETS_CACHE",
    ):
        load("prompts", [{"input": "a"}], tokenizer, dataset_num_proc=2)


def test_the_cache_of_a_run_that_was_quicker_is_used(tokenizer, renderings, monkeypatch):
    rename = os.rename

    def too_late(source, target):
        rename(source, target)
        raise OSError("Directory not empty")

    monkeypatch.setattr(os, "rename", too_late)
    [prompt] = load("prompts", [{"input": "a"}], tokenizer, dataset_num_proc=2)
    assert prompt == load("prompts", [{"input": "a"}], tokenizer)[0]


class InTurn(SingleProcess):
    """A rank of two that runs alone; what it does is noted when it meets the other."""

    def __init__(self, done):
        self.done = done

    def all_gather_object(self, value):
        self.done.append("met")
        return [value]


@pytest.mark.parametrize(
    ("local_rank", "processes", "expected"),
    [("0", 2, ["load", "met", "met"]), ("1", 2, ["met", "load", "met"]), ("1", 0, ["load", "met"])],
)
def test_the_first_rank_of_a_host_loads_before_the_others(
    monkeypatch, local_rank, processes, expected
):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    done, options = [], SupervisedConfig("m", "d", dataset_num_proc=processes)
    assert once_per_host(InTurn(done), options, lambda: done.append("load") or [1]) == [1]
    assert done == expected
    assert PPODataConfig("d").dataset_num_proc == 0
