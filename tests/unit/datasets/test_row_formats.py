"""Rows in common formats, read into the same fields."""

import pytest

from openppo.config import RowsConfig
from openppo.datasets.row_fields import RowFields
from openppo.datasets.row_reader import RowReader
from openppo.datasets.sources import number_rows

USER, MORE = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
GOOD, BAD = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
HUMAN, GPT, GPT_BAD = (
    {"from": name, "value": text} for name, text in (("human", "q"), ("gpt", "a"), ("gpt", "b"))
)
Q_A, Q_B, R_A = (f"\n\nHuman: {q}\n\nAssistant: {a}" for q, a in ("qa", "qb", "ra"))


def read(row, task, data_format="auto", chat=True, keys=None):
    rows, options = (
        number_rows([row]),
        RowsConfig(data_format=data_format, apply_chat_template=chat),
    )
    return RowReader(rows, task, options, keys).read(rows[0])


VERL = {
    "data_source": "d",
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": "1"},
}
CHAT = RowFields(prompt=[USER], response=[GOOD], label="a", conversation=[USER, GOOD])
PAIR = RowFields(prompt=[USER], response=[GOOD], chosen=[GOOD], rejected=[BAD])
MARKED = {"input": "s1 ки s2 ки", "label": "s1 + s2 -"}
JUDGED = {"prompt": "q", "completions": ["s", "t"], "labels": [True, False]}
WRONG_AT_2 = {"model_output_steps": ["s", "t", "u"], "model_output_solution_first_error_step": 2}
READINGS = [
    ({"input": "q", "output": "a"}, "plain", RowFields(prompt="q", response="a", label="a")),
    (
        {"prompt": "q", "completion": "a", "label": 3},
        "plain",
        RowFields(prompt="q", response="a", label=3),
    ),
    (
        {"prompt": [USER], "response": [GOOD]},
        "plain",
        RowFields(prompt=[USER], response=[GOOD], label=[GOOD]),
    ),
    ({"text": "q"}, "plain", RowFields(prompt="q", whole="q")),
    ({"messages": [USER, GOOD], "prompt": "q"}, "messages", CHAT),
    (
        {"messages": [USER, MORE]},
        "messages",
        RowFields(prompt=[USER, MORE], conversation=[USER, MORE]),
    ),
    ({"conversations": [HUMAN, GPT]}, "sharegpt", CHAT),
    ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT_BAD}, "sharegpt", PAIR),
    (
        {"instruction": "q", "input": "", "output": "a"},
        "alpaca",
        RowFields(prompt="q", response="a", label="a"),
    ),
    (
        {"instruction": "q", "input": "r", "output": "a"},
        "alpaca",
        RowFields(prompt="q\nr", response="a", label="a"),
    ),
    (
        {"question": "q", "answer": "a #### 1"},
        "question_answer",
        RowFields("q", "a #### 1", label="a #### 1"),
    ),
    (
        {"problem": "q", "solution": "s", "answer": "1"},
        "question_answer",
        RowFields("q", "s", label="1"),
    ),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", RowFields("q", "a", "a", "b")),
    (
        {"question": "q", "chosen": [GOOD], "rejected": [BAD]},
        "preference",
        RowFields("q", [GOOD], [GOOD], [BAD]),
    ),
    ({"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": "q"}, "preference", PAIR),
    ({"chosen": Q_A, "rejected": Q_B}, "hh", PAIR),
    (MARKED, "math_shepherd", RowFields(response=MARKED["input"], label=MARKED["label"])),
    (JUDGED, "steps", RowFields("q", ["s", "t"], label=[True, False])),
    ({"question": "q", **WRONG_AT_2}, "steps", RowFields("q", ["s", "t"], label=[True, False])),
    (
        {"question": "q", "steps": ["s"], "first_wrong_step": None},
        "steps",
        RowFields("q", ["s"], label=[True]),
    ),
]


@pytest.mark.parametrize(("row", "name", "fields"), READINGS)
def test_a_row_is_recognized_by_its_columns(row, name, fields, caplog):
    """Judged steps are cut after the first wrong one."""
    caplog.set_level("INFO")
    tasks = ["pairs" if "rejected" in row else "sft", "prompts"]
    for task in ["steps"] if name in ("steps", "math_shepherd") else tasks:
        caplog.clear()
        assert read(row, task) == fields
        (message,) = caplog.messages
        assert f"--dataset: rows are read as {name}, by their columns " in message
        assert read(row, task, data_format=name) == fields


@pytest.mark.parametrize(
    ("row", "label"),
    [
        (VERL | {"extra_info": {"index": 3, "tools_kwargs": {"f": None}}}, "1"),
        (VERL | {"reward_model": {"ground_truth": {"target": ["a", "b"]}}}, {"target": ["a", "b"]}),
        (VERL | {"reward_model": None}, None),
        ({"prompt": [USER], "extra_info": None}, None),
    ],
)
def test_rows_of_verl_have_their_label_in_reward_model(row, label, caplog):
    caplog.set_level("INFO")
    assert (
        read(row, "prompts")
        == read(row, "prompts", data_format="verl")
        == RowFields(prompt=[USER], label=label)
    )
    assert caplog.messages[0].startswith(
        "--dataset: rows are read as verl, by their columns prompt, "
    )


@pytest.mark.parametrize(
    "row", [VERL | {"prompt": "q"}, VERL | {"reward_model": "rm"}, {"prompt": [USER], "label": 1}]
)
def test_other_rows_are_not_taken_for_rows_of_verl(row):
    assert read(row, "prompts") == RowFields(prompt=row["prompt"], label=row.get("label"))


def test_a_named_column_goes_before_recognition():
    row, keys = (
        {"instruction": "q", "input": "i", "output": "a"},
        {"prompt": ("input", "--input_key")},
    )
    assert read(row, "sft", keys=keys) == RowFields(prompt="i")
    with pytest.raises(
        ValueError, match="--data_format alpaca knows its columns, and --input_key names others"
    ):
        read(row, "sft", data_format="alpaca", keys=keys)


def test_transcripts_part_where_they_first_differ_and_texts_are_kept_to_the_letter():
    row = {
        "chosen": Q_A + "\n\nHuman: r\n\nAssistant: a",
        "rejected": Q_A + "\n\nHuman: s\n\nAssistant: b",
    }
    parts = read(row, "pairs")
    assert parts.prompt == [USER]
    assert parts.chosen == [GOOD, MORE, GOOD]
    assert parts.rejected == [GOOD, {"role": "user", "content": "s"}, BAD]
    assert read({"chosen": Q_A, "rejected": Q_A}, "pairs") == RowFields(
        [USER], [GOOD], [GOOD], [GOOD]
    )
    row = {"chosen": Q_A, "rejected": R_A}  # which have no prompt
    assert read(row, "pairs") == RowFields(
        response=[USER, GOOD], chosen=[USER, GOOD], rejected=[MORE, GOOD]
    )
    assert read(row, "pairs", chat=False).chosen == Q_A
    parts = read({"chosen": "\n\nHuman: q\n\nAssistant:  a ", "rejected": Q_B}, "pairs", chat=False)
    assert (parts.prompt, parts.chosen, parts.rejected) == (
        "\n\nHuman: q\n\nAssistant:",
        "  a ",
        " b",
    )


def test_each_source_has_a_format_of_its_own(caplog):
    caplog.set_level("INFO")
    rows = [*number_rows([{"input": "q"}], "one"), *number_rows([{"question": "r"}] * 2, "two")]
    reader = RowReader(rows, "prompts", RowsConfig())
    assert [reader.read(row).prompt for row in rows] == ["q", "r", "r"]
    assert ["two" in message for message in caplog.messages] == [False, True]


@pytest.mark.parametrize(
    ("row", "task", "data_format", "message"),
    [
        (
            {"a": 1, "b": 2},
            "prompts",
            "auto",
            "no known format. Its columns are a, b: .*--input_key, or .*--data_form",
        ),
        (
            {"a": 1},
            "pairs",
            "auto",
            r"Its columns are a: .*--chosen_key and --rejected_key, or .*--data_format",
        ),
        (
            {"input": "q"},
            "sft",
            "alpaca",
            r"'alpaca' \('instruction' and 'output'\). Its columns are input: .*--inp",
        ),
        (
            {"input": "q"},
            "pairs",
            "alpaca",
            "alpaca is not for this command: use hh, preference, ranking, sharegpt",
        ),
        (
            {"messages": [HUMAN]},
            "sft",
            "auto",
            'not a chat message with texts "role" and "content"',
        ),
        (
            {"conversations": [{"from": "me", "value": "q"}]},
            "sft",
            "auto",
            r'not a turn with "from" \(one of human, ',
        ),
        ({"conversations": "q"}, "sft", "auto", "'conversations' is not a list of turns: 'q'"),
        ({"instruction": 3, "output": "a"}, "sft", "auto", "not a text but int"),
        (
            {"question": "q", "steps": ["s"], "first_wrong_step": 2},
            "steps",
            "auto",
            "wrong step is 2, and there are 1",
        ),
        (
            {"question": "q", "steps": "s", "first_wrong_step": 2},
            "steps",
            "auto",
            "steps are not a list but str",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error_with_columns_and_remedy(row, task, data_format, message):
    with pytest.raises(ValueError, match=message):
        read(row, task, data_format)


def test_a_later_row_of_another_format_is_an_error():
    rows = number_rows([{"question": "q", "answer": "a"}, {"question": "q", "reply": "a"}])
    message = r"not of format 'question_answer' \('question' .* or 'answer'\).* starts. Its columns are question, reply"
    with pytest.raises(ValueError, match=message):
        RowReader(rows, "sft", RowsConfig()).read(rows[1])
    rows = number_rows([{"chosen": Q_A, "rejected": Q_B}, {"chosen": "a", "rejected": "b"}])
    with pytest.raises(ValueError, match="not of format 'hh' .*, with which its source starts"):
        RowReader(rows, "pairs", RowsConfig()).read(rows[1])
