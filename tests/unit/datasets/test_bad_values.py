"""Every value that a file can hold, in every column of every format: examples, or an error that names flag and row."""

import pytest

from tests.unit.datasets.loaders import WITH_CHAT, flag_of, load, turns

CHAT, OTHER = turns(user="a", assistant="b"), turns(user="a", assistant="c")
TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
TRANSCRIPTS = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Go",
}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
COMMON = [
    *(
        {"messages": CHAT},
        {"conversations": TURNS},
        TRANSCRIPTS,
        PAIR,
        {"chosen": CHAT, "rejected": OTHER},
    ),
    *(
        {"instruction": "a", "input": "b", "output": "c"},
        {"question": "a", "answer": "b"},
        {"text": "a"},
    ),
]
SHAREGPT_PAIR = {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}
STEPS = {"prompt": "a", "steps": ["b", "c"]}
ROWS = {
    "prompts": [*COMMON, {"input": "a", "label": "c"}],
    "sft": [*COMMON, {"input": "a", "output": "c"}],
    "pairs": [
        SHAREGPT_PAIR,
        {**PAIR, "margin": 1.0},
        TRANSCRIPTS,
        {"chosen": CHAT, "rejected": OTHER},
    ],
    "steps": [
        *({"input": "a ! b !", "label": "a + b -"}, {**STEPS, "labels": [True, False]}),
        *({**STEPS, "labels": [0.5, 1.0]}, {**STEPS, "first_wrong_step": 2}),
    ],
    "documents": [{"text": "a"}],
}
NO_NUMBER = float("nan")
VALUES = [
    *(None, "", "  ", "N/A", "\n\nHuman:", "a\0b", "é\u2028", "\ud800", b"ab"),
    *(0, 3, -1, 10**400, 3.5, NO_NUMBER, float("inf"), True),
    *(
        [],
        [None],
        [""],
        ["a"],
        ["\ud800"],
        [1, 2],
        [NO_NUMBER, 1],
        [10**400, 0],
        [True, None],
        [[]],
        [{}],
    ),
    *(
        {},
        {"a": 1},
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": 3, "content": "a"}],
    ),
    *(
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "\ud800", "content": "a"}],
    ),
    *([{"role": "user", "content": ""}], [{"role": "assistant", "content": ""}]),
    *(
        [{"from": "human", "value": ""}],
        [{"from": "x", "value": "a"}],
        [{"from": "human", "value": None}],
    ),
]


def load_alike(task, rows, *others, **options):
    """With the judgements and margins of these rows."""
    data = (
        {"margin_key": "margin"}
        if "margin" in rows[0]
        else {"placeholder_token": "!"}
        if task == "steps"
        else {}
    )
    return load(task, rows, *others, data, **options)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", ROWS)
def test_any_value_in_any_column_is_read_or_an_error_naming_flag_and_row(task, chat, tokenizer):
    n_errors = 0
    for good in ROWS[task]:
        for column in good:
            for value in VALUES:
                try:
                    load_alike(
                        task, [good, {**good, column: value}], tokenizer, apply_chat_template=chat
                    )
                except ValueError as error:
                    n_errors += 1
                    rows = (
                        "row 1 of file: ",
                        "row 2 of file: ",
                    )  # the first for formats that need, or refuse, a chat
                    assert any(str(error).startswith(f"{flag_of(task)}, {row}") for row in rows), (
                        good,
                        column,
                        value,
                    )
                    assert len(str(error)) < 500
    assert n_errors >= 5


HI, GOOD, WITH_TEMPLATE = turns(user="hi"), turns(assistant="b"), {"input_template": "Q{}"}
CALLS_3 = {**GOOD[0], "tool_calls": [{"function": {"name": 3}}]}
WHOLE = {"prompt": "x", "chosen": HI + GOOD, "rejected": HI + GOOD}


@pytest.mark.parametrize(
    ("task", "row", "options", "message"),
    [
        (
            "prompts",
            {"question": "", "answer": "a"},
            WITH_TEMPLATE,
            "the text is empty. Remove the row",
        ),
        ("sft", {"input": "", "output": "a"}, {}, "the text is empty. Remove the row"),
        ("pairs", {**PAIR, "prompt": ""}, {}, ".*the text is empty. Remove the row"),
        (
            "prompts",
            {"messages": [{"role": "user", "content": ""}]},
            WITH_CHAT,
            "all chat messages are empty",
        ),
        ("prompts", {"input": []}, WITH_CHAT, "the list of chat messages is empty"),
        ("pairs", {**PAIR, "prompt": None}, {}, "the prompt in column 'prompt' is null"),
        ("pairs", {**PAIR, "prompt": "\ud83d"}, {}, ".*surrogates not allowed"),
        ("documents", {"text": "smile \ud83d"}, {}, ".*surrogates not allowed"),
        ("prompts", {"messages": turns(user="\ud83d")}, WITH_CHAT, ".*surrogates not allowed"),
        ("sft", {"messages": [{"role": "user", "content": None}]}, WITH_CHAT, "not a chat message"),
        ("sft", {"messages": [CALLS_3]}, WITH_CHAT, "not a chat message"),
        (
            "sft",
            {"messages": [{**GOOD[0], "content": [{"type": "image"}]}]},
            WITH_CHAT,
            "not a chat message with a te",
        ),
        ("prompts", {"input": HI}, {}, "a list of chat messages needs --apply_chat_template"),
        (
            "prompts",
            {"input": HI},
            WITH_CHAT | WITH_TEMPLATE,
            "--input_template goes around a text",
        ),
        (
            "prompts",
            {"input": None},
            WITH_CHAT,
            "neither a text nor a list of chat messages but NoneType",
        ),
        (
            "prompts",
            {"input": [{"from": "a" * 200}]},
            WITH_CHAT,
            r'not a chat message with texts "role".*\.\.\.\.$',
        ),
        (
            "pairs",
            {"chosen": GOOD, "rejected": "b"},
            {},
            "a list of chat messages needs --apply_chat",
        ),
        ("pairs", {"chosen": "a", "rejected": 1}, {}, "not a text but int"),
        ("pairs", {"chosen": "a", "rejected": "b"}, WITH_CHAT, "a whole text cannot be split"),
        (
            "pairs",
            {"chosen": "a", "rejected": "b"},
            WITH_TEMPLATE,
            ".*goes around a prompt.*prompt_key",
        ),
        (
            "pairs",
            {"chosen": {"from": "gpt"}, "rejected": "b"},
            WITH_CHAT,
            ".*neither a text nor a list .* dict",
        ),
        ("named pairs", WHOLE, WITH_CHAT, "a whole conversation .*Leave --prompt_key"),
    ],
)
def test_a_bad_value_is_an_error_that_says_what_to_do(task, row, options, message, tokenizer):
    columns, task = {"prompt_key": "prompt"} if "named" in task else {}, task.removeprefix("named ")
    with pytest.raises(ValueError, match=f"^{flag_of(task)}, row 1 of file: {message}"):
        load(task, [row], tokenizer, columns, **options)


@pytest.mark.parametrize("task", ROWS)
def test_rows_are_shown_one_by_one_as_they_are_tokenized(tokenizer, task):
    shown = []

    def show(rows):
        for row in rows:
            yield row
            shown.append(row.number)

    load_alike(task, [ROWS[task][1 if task == "pairs" else -1]] * 3, tokenizer, show=show)
    assert shown == [1, 2, 3]
