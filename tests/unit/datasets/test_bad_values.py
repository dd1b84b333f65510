"""Every value that a file can hold, in every column of every format: examples, or an error that names flag and row."""

from typing import Any

import pytest

from openppo.config import PPODataConfig, PreferenceConfig, ProcessConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_documents,
    load_preferences,
    load_process_examples,
    load_prompts,
    load_sft_examples,
    number_rows,
)

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OTHER = [CHAT[0], {"role": "assistant", "content": "c"}]
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
TRANSCRIPTS = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
COMMON = [
    {"messages": CHAT},
    {"conversations": TURNS},
    TRANSCRIPTS,
    PAIR,
    {"chosen": CHAT, "rejected": OTHER},
    {"instruction": "a", "input": "b", "output": "c"},
    {"question": "a", "answer": "b"},
    {"text": "a"},
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompts": [*COMMON, {"input": "a", "label": "c"}],
    "sft": [*COMMON, {"input": "a", "output": "c"}],
    "pairs": [
        {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]},
        {**PAIR, "margin": 1.0},
        TRANSCRIPTS,
        {"chosen": CHAT, "rejected": OTHER},
    ],
    "steps": [
        {"input": "a ! b !", "label": "a + b -"},
        {"prompt": "a", "steps": ["b", "c"], "labels": [True, False]},
        {"prompt": "a", "steps": ["b", "c"], "labels": [0.5, 1.0]},
        {"prompt": "a", "steps": ["b", "c"], "first_wrong_step": 2},
    ],
    "documents": [{"text": "a"}],
}
NO_NUMBER = float("nan")
VALUES: list[Any] = [
    *(None, "", "  ", "N/A", "\n\nHuman:", "a\0b", "é\u2028", "\ud800", b"ab"),
    *(0, 3, -1, 10**400, 3.5, NO_NUMBER, float("inf"), True),
    *([], [None], [""], ["a"], ["\ud800"], [1, 2], [NO_NUMBER, 1], [10**400, 0], [True, None], [[]], [{}]),
    *({}, {"a": 1}, [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 3, "content": "a"}]),
    *([{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"role": "\ud800", "content": "a"}]),
    *([{"role": "user", "content": ""}], [{"role": "assistant", "content": ""}]),
    *([{"from": "human", "value": ""}], [{"from": "x", "value": "a"}], [{"from": "human", "value": None}]),
]


def load(task: str, rows: list[dict[str, Any]], tokenizer: Any, chat: bool = False, show: Any = iter) -> Any:
    """Examples of ``rows``, and where rows may be dropped how many were."""
    numbered, shown = number_rows(rows, "file"), {"flag": "--flag", "show": show}
    supervised = SupervisedConfig("m", "d", apply_chat_template=chat, max_len=100)
    if task == "prompts":
        options = PPODataConfig("d", apply_chat_template=chat, prompt_max_len=100)
        return load_prompts(numbered, tokenizer, options, **shown)
    if task == "documents":
        return load_documents(numbered, tokenizer, None, 100, show=show)
    if task == "sft":
        return load_sft_examples(numbered, tokenizer, supervised, SFTDataConfig(), **shown)
    if task == "pairs":
        data = PreferenceConfig(margin_key="margin" if "margin" in rows[0] else None)
        return load_preferences(numbered, tokenizer, supervised, data, **shown)
    return load_process_examples(numbered, tokenizer, supervised, ProcessConfig(None, None, "!"), **shown)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", ROWS)
def test_any_value_in_any_column_is_read_or_an_error_naming_flag_and_row(task, chat, tokenizer):
    flag = "--pretrain_data" if task == "documents" else "--flag"
    n_errors = 0
    for good in ROWS[task]:
        for column in good:
            for value in VALUES:
                try:
                    load(task, [good, {**good, column: value}], tokenizer, chat)
                except ValueError as error:
                    n_errors += 1
                    rows = ("row 1 of file: ", "row 2 of file: ")  # the first for formats that need, or refuse, a chat
                    assert any(str(error).startswith(f"{flag}, {row}") for row in rows), (good, column, value)
                    assert len(str(error)) < 500
    assert n_errors >= 5


@pytest.mark.parametrize(
    ("task", "row", "chat", "message"),
    [
        ("prompts", {"question": "", "answer": "a"}, False, "the text is empty. Remove the row"),
        ("sft", {"input": "", "output": "a"}, False, "the text is empty. Remove the row"),
        ("pairs", {**PAIR, "prompt": ""}, False, ".*the text is empty. Remove the row"),
        ("prompts", {"messages": [{"role": "user", "content": ""}]}, True, "all chat messages are empty"),
        ("pairs", {**PAIR, "prompt": None}, False, "the prompt in column 'prompt' is null"),
        ("pairs", {**PAIR, "prompt": "\ud83d"}, False, r".*half of a surrogate pair, U\+D83D"),
        ("documents", {"text": "smile \ud83d"}, False, r".*half of a surrogate pair, U\+D83D"),
        ("prompts", {"messages": [{"role": "user", "content": "\ud83d"}]}, True, r"half of a surrogate pair, U\+D83D"),
    ],
)
def test_an_empty_prompt_or_half_a_character_is_an_error(task, row, chat, message, tokenizer):
    flag = "--pretrain_data" if task == "documents" else "--flag"
    with pytest.raises(ValueError, match=f"{flag}, row 1 of file: {message}"):
        load(task, [row], tokenizer, chat)


@pytest.mark.parametrize("task", ROWS)
def test_rows_are_shown_one_by_one_as_they_are_tokenized(tokenizer, task):
    shown = []

    def show(rows: Any) -> Any:
        for row in rows:
            yield row
            shown.append(row.number)

    load(task, [ROWS[task][1 if task == "pairs" else -1]] * 3, tokenizer, show=show)
    assert shown == [1, 2, 3]
