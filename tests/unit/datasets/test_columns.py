"""Every column of a row is read or named in one line, and a text that may be the prompt is not lost."""

import pytest

from tests.unit.datasets.loaders import WITH_CHAT, load, shown, turns

SIDES = {"chosen": "b", "rejected": "c"}
GOOD, BAD = turns(assistant="b"), turns(assistant="c")
HISTORY = {"instruction": "r", "input": "", "output": "s", "system": "P", "history": [["q", "a"]]}


def texts_of(row, tokenizer, columns=None, **options):
    (example,) = load("pairs", [row], tokenizer, columns, **options)
    return [tokenizer.decode(ids) for ids in example.texts]


PROMPTS = {
    "instruction": ({"instruction": "a"}, "a"),
    "instruction with an empty input": ({"instruction": "a", "input": ""}, "a"),
    "instruction with input": ({"instruction": "a", "input": "x"}, "a\nx"),
    "input": ({"input": "a"}, "a"),
    "query": ({"query": "a"}, "a"),
    "context": ({"context": "a"}, "a"),
    "problem": ({"problem": "a"}, "a"),
    "question before context": ({"context": "x", "question": "a"}, "a"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_of_a_preference_is_in_what_is_scored(tokenizer, name):
    columns, prompt = PROMPTS[name]
    assert texts_of({**columns, **SIDES}, tokenizer) == [
        f"<bos>{prompt}{side}<eos>" for side in "bc"
    ]
    asked = f"<bos><user>{prompt}<eos>\n<assistant>"
    for sides in (SIDES, {"chosen": GOOD, "rejected": BAD}):
        assert texts_of({**columns, **sides}, tokenizer, **WITH_CHAT) == [
            f"{asked}{side}<eos>" for side in "bc"
        ]
    assert texts_of({**columns, "responses": ["b", "c"]}, tokenizer) == [
        f"<bos>{prompt}{side}<eos>" for side in "bc"
    ]
    (asked,) = load("prompts", [{**columns, **SIDES}], tokenizer)
    (answer,) = load("sft", [{**columns, **SIDES}], tokenizer)
    assert (asked.text, shown(answer, tokenizer)) == (prompt, f"<bos>{prompt}«b<eos>»")


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_the_system_text_of_a_preference_is_scored(tokenizer, name):
    for prompt in ({"question": "a"}, {"prompt": turns(user="a")}):
        row = {name: "P", **prompt, **SIDES}
        chats = [f"<bos><system>P<eos>\n<user>a<eos>\n<assistant>{side}<eos>" for side in "bc"]
        assert texts_of(row, tokenizer, **WITH_CHAT) == chats
    assert texts_of({name: "P", "question": "a", **SIDES}, tokenizer) == [
        "<bos>P\nab<eos>",
        "<bos>P\nac<eos>",
    ]
    assert texts_of({name: "", "question": "a", **SIDES}, tokenizer) == [
        "<bos>ab<eos>",
        "<bos>ac<eos>",
    ]
    with pytest.raises(
        ValueError, match=r"^--dataset, row 1 of file: not a text but dict: {'a': 1}"
    ):
        load("pairs", [{name: {"a": 1}, "question": "a", **SIDES}], tokenizer)
    whole = {
        "chosen": turns(system="P", user="a") + GOOD,
        "rejected": turns(system="P", user="a") + BAD,
    }
    assert texts_of({name: "P", **whole}, tokenizer, **WITH_CHAT) == chats  # written once


def test_system_and_history_of_alpaca_are_read(tokenizer):
    (example,) = load("sft", [HISTORY], tokenizer, **WITH_CHAT)
    chat = "<bos><system>P<eos>\n<user>q<eos>\n<assistant>{}\n<user>r<eos>\n<assistant>"
    assert shown(example, tokenizer) == chat.format("«a<eos>»") + "«s<eos>»"
    (prompt,) = load("prompts", [HISTORY], tokenizer, **WITH_CHAT)
    assert (prompt.text, prompt.label) == (chat.format("a<eos>"), "s")
    (example,) = load("sft", [HISTORY], tokenizer)
    assert shown(example, tokenizer) == "<bos>P\nq\na\nr«s<eos>»"
    texts = texts_of({**HISTORY, **SIDES}, tokenizer, **WITH_CHAT)
    assert texts == [chat.format("a<eos>") + f"{side}<eos>" for side in "bc"]
    for nothing in (None, [], ""):
        (example,) = load(
            "sft", [{**HISTORY, "system": nothing, "history": nothing}], tokenizer, **WITH_CHAT
        )
        assert shown(example, tokenizer) == "<bos><user>r<eos>\n<assistant>«s<eos>»"
    (example,) = load("sft", [{**HISTORY, "history": '[["q", "a"]]'}], tokenizer)  # of a CSV file
    assert shown(example, tokenizer) == "<bos>P\nq\na\nr«s<eos>»"
    for history in ("q", [["q"]], [["q", 3]]):
        with pytest.raises(
            ValueError, match="row 1 of file: column 'history' is not a list of pairs"
        ):
            load("sft", [{**HISTORY, "history": history}], tokenizer)


def test_the_system_column_of_other_formats_is_read(tokenizer):
    asked = {"from": "human", "value": "a"}
    expected = "<bos><system>P<eos>\n<user>a<eos>\n<assistant>«b<eos>»"
    for row in (
        {"conversations": [asked, {"from": "gpt", "value": "b"}]},
        {"messages": turns(user="a", assistant="b")},
        {"question": "a", "answer": "b"},
        {"prompt": "a", "response": "b"},
    ):
        (example,) = load("sft", [{**row, "system": "P"}], tokenizer, **WITH_CHAT)
        assert shown(example, tokenizer) == expected
        (prompt,) = load("prompts", [{**row, "system": "P"}], tokenizer, **WITH_CHAT)
        assert prompt.text == expected.partition("«")[0]
    row = {"system": "P", "conversations": [asked], "chosen": {"from": "gpt", "value": "b"}}
    row["rejected"] = {"from": "gpt", "value": "c"}
    assert (
        texts_of(row, tokenizer, **WITH_CHAT)[1]
        == "<bos><system>P<eos>\n<user>a<eos>\n<assistant>c<eos>"
    )
    (example,) = load(
        "steps",
        [{"system": "P", "prompt": "a", "steps": ["b"], "labels": [True]}],
        tokenizer,
        STEPS,
    )
    assert tokenizer.decode(example.token_ids) == "<bos>P\na\n\nb!"


STEPS = {"placeholder_token": "!"}
UNREAD = {
    "sft": ({"input": "a", "prompt": "x", "output": "b", "id": 3}, {}, "prompt, id"),
    "sft, named": (
        {"q": "a", "n": {"r": "b"}, "id": 3},
        {"input_key": "q", "output_key": "n.r"},
        "id",
    ),
    "pairs": ({"prompt": "a", "hint": "x", **SIDES, "m": 1}, {"margin_key": "m"}, "hint"),
    "pairs of chats": (
        {"q": "x", "chosen": turns(user="a") + GOOD, "rejected": turns(user="a") + BAD},
        {},
        "q",
    ),
    "steps": ({"prompt": "a", "steps": ["b"], "labels": [True], "level": "x"}, STEPS, "level"),
    "prompts": ({"question": "a", "answer": "b", "level": 2}, {"label_key": "answer"}, "level"),
    "documents": ({"text": "a", "title": "x"}, {}, "title"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_columns_that_are_not_read_are_named_in_one_line(tokenizer, name, caplog):
    caplog.set_level("INFO", "openppo")
    row, columns, expected = UNREAD[name]
    task, options = name.split()[0].rstrip(","), WITH_CHAT if "chats" in name else {}
    if task == "prompts":
        columns, options = {}, columns
    load(task, [{**row, "nothing": None}, {**row, "empty": ""}], tokenizer, columns, **options)
    (line,) = [message for message in caplog.messages if "not read" in message]
    flag = {"prompts": "--prompt_data", "documents": "--pretrain_data"}.get(task, "--dataset")
    assert line.startswith(f"{flag} file: columns not read: {expected}")
    caplog.clear()
    kept = {column: value for column, value in row.items() if column not in expected.split(", ")}
    load(task, [kept], tokenizer, columns, **options)
    assert not [message for message in caplog.messages if "not read" in message]


@pytest.mark.parametrize("options", [{}, WITH_CHAT])
@pytest.mark.parametrize("sides", [SIDES, {"chosen": GOOD, "rejected": BAD}])
def test_preferences_without_prompt_beside_an_unread_text_are_refused(tokenizer, sides, options):
    message = "^--dataset, row 1 of file: no prompt, and column 'ask' is not read. .*--prompt_key.*--data_format"
    with pytest.raises(ValueError, match=message):
        load("pairs", [{"ask": "a", **sides}], tokenizer, **options)
    with pytest.raises(ValueError, match=message):
        load(
            "pairs",
            [{"ask": "a", **sides, "c": sides["chosen"]}],
            tokenizer,
            {"chosen_key": "c"},
            **options,
        )
    with pytest.raises(ValueError, match=message):
        load("pairs", [{"n": "1.5", "ask": turns(user="a"), **sides}], tokenizer, **options)


def test_whole_texts_beside_other_texts_are_read_where_the_format_is_named(tokenizer, caplog):
    caplog.set_level("INFO", "openppo")
    row, columns = {"ask": "x", **SIDES, "c": "d"}, {"chosen_key": "c"}
    assert texts_of(row, tokenizer, data_format="preference") == ["<bos>b<eos>", "<bos>c<eos>"]
    assert "--dataset file: columns not read: ask, c" in caplog.text
    assert texts_of(row, tokenizer, columns, data_format="plain") == ["<bos>d<eos>", "<bos>c<eos>"]
    assert texts_of({"id": 3, "ask": None, **SIDES}, tokenizer) == ["<bos>b<eos>", "<bos>c<eos>"]


def test_a_whole_text_beside_a_prompt_is_refused_in_sft(tokenizer):
    with pytest.raises(
        ValueError, match="^--dataset, row 1 of file: no prompt, and column 'query' .*--input_key"
    ):
        load("sft", [{"text": "a", "query": "b"}], tokenizer)
    named = {"input_key": "text", "output_key": None}
    for columns, row in ((named, {"text": "a", "query": "b"}), ({}, {"text": "a", "title": "b"})):
        (example,) = load("sft", [row], tokenizer, columns)
        assert shown(example, tokenizer) == "<bos>«a<eos>»"


KTO = {
    "texts": {"prompt": "a", "completion": "b"},
    "chats": {"prompt": turns(user="a"), "completion": GOOD},
    "messages": {"messages": turns(user="a", assistant="b")},
}


@pytest.mark.parametrize("name", KTO)
@pytest.mark.parametrize("column", ["label", "kto_tag"])
def test_answers_labelled_false_are_not_trained(tokenizer, name, column, caplog):
    rows = [{**KTO[name], column: label} for label in (True, False, True, False)]
    options = {} if name == "texts" else WITH_CHAT
    assert len(load("sft", rows, tokenizer, **options)) == 2
    assert f"--dataset file: 2 of 4 rows are not trained: their {column!r} is false" in caplog.text
    with pytest.raises(
        ValueError, match=f"--dataset: no row is left: {column!r} is false in all of them"
    ):
        load("sft", rows[1:2], tokenizer, **options)


def test_kto_rows_of_csv_are_left_out_and_answers_false_are_kept(tokenizer):
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in ("True", "False")]
    assert len(load("sft", rows, tokenizer)) == 1
    columns = {"input_key": "prompt", "output_key": "completion"}
    assert (
        len(
            load(
                "sft",
                [{**row, "label": row["label"] == "True"} for row in rows],
                tokenizer,
                columns,
            )
        )
        == 1
    )
    for row in (
        {"prompt": "a", "response": "b", "label": "False"},
        {"input": "a", "output": "b", "label": 0},
    ):
        assert len(load("sft", [row], tokenizer)) == 1
    for label in (True, False):
        (prompt,) = load("prompts", [{**KTO["texts"], "label": label}], tokenizer)
        assert prompt.label is label
