"""Prompts, examples of the language-model loss, documents and pairs. BOS is id 2, EOS id 3, <user> 4, <assistant> 5."""

import pytest

from openppo.config import PromptsConfig, RowsConfig
from openppo.datasets import load_prompts, number_rows, render_prompt
from tests.unit.datasets.loaders import OTHER_WHEN_ASKED, WITH_CHAT, WITHOUT_END, load, shown, turns

BOS, EOS, USER, ASSISTANT = 2, 3, 4, 5
HI = turns(user="hi")


def render(value, tokenizer, template=None, chat=False):
    return render_prompt(
        value, tokenizer, RowsConfig(input_template=template, apply_chat_template=chat)
    )


# tokenizer's additions, value, template, chat -> the tokens
RENDERED = {
    "plain": ({}, "hi", None, False, "hi"),
    "BOS of the tokenizer": ({"bos": True}, "hi", None, False, "<bos>hi"),
    "EOS of the tokenizer is removed": ({"bos": True, "eos": True}, "hi", None, False, "<bos>hi"),
    "EOS of the text stays beside the tokenizer's": (
        {"eos": True},
        "hi<eos>",
        None,
        False,
        "hi<eos>",
    ),
    "all three": ({"bos": True, "eos": True}, "hi<eos>", None, False, "<bos>hi<eos>"),
    "BOS of the text is not doubled": ({"bos": True}, "<bos>ab", None, False, "<bos>ab"),
    "BOS inside the text stays": ({"bos": True}, "a<bos>b", None, False, "<bos>a<bos>b"),
    "template and braces": ({"bos": True}, "a{}b{x}", "Q: {}\nA:", False, "<bos>Q: a{}b{x}\nA:"),
    "chat": ({"bos": True}, HI, None, True, "<bos><user>hi<eos>\n<assistant>"),
    "template inside a chat": (
        {"bos": True},
        "hi",
        "Q: {}",
        True,
        "<bos><user>Q: hi<eos>\n<assistant>",
    ),
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_is_what_generation_starts_from(make_tokenizer, name):
    added, value, template, chat, expected = RENDERED[name]
    tokenizer = make_tokenizer(**added)
    prompt = render(value, tokenizer, template, chat)
    text, ids = prompt.text, prompt.token_ids
    assert tokenizer.decode(ids) == expected
    assert text == expected if chat else expected.endswith(text)
    if name == "chat":
        assert [ids[0], ids[1], ids[4], ids[-1]] == [BOS, USER, EOS, ASSISTANT]


def test_templates_that_do_not_work_are_errors(make_tokenizer):
    with pytest.raises(
        ValueError, match=r"--apply_chat_template: the tokenizer has no chat template"
    ):
        load("prompts", [{"input": "a"}], make_tokenizer(chat_template=None), **WITH_CHAT)
    with pytest.raises(
        ValueError,
        match=r"--prompt_data, row 1 of file: the chat template leaves out turn 1, .*'a'",
    ):
        load("prompts", [{"input": "a"}], make_tokenizer(chat_template="{{ '' }}"), **WITH_CHAT)
    with pytest.raises(ValueError, match="the tokenizer of --pretrain has no EOS token"):
        load("sft", [{"text": "a"}], make_tokenizer(has_eos=False))


def test_prompts_keep_order_row_label_messages_and_place(tokenizer):
    rows = [{"q": "one", "a": 1}, {"q": "two", "a": None}]
    prompts = load("prompts", rows, tokenizer, input_key="q", label_key="a")
    assert [(p.text, p.label, p.row) for p in prompts] == [
        ("one", 1, rows[0]),
        ("two", None, rows[1]),
    ]
    assert [(p.source, p.index, p.messages) for p in prompts] == [
        ("file", 0, None),
        ("file", 1, None),
    ]
    assert tokenizer.decode(prompts[0].token_ids) == "<bos>one"
    (chat,) = load(
        "prompts", rows[:1], tokenizer, input_key="q", input_template="Q: {}", **WITH_CHAT
    )
    assert (chat.messages, chat.text) == (
        turns(user="Q: one"),
        "<bos><user>Q: one<eos>\n<assistant>",
    )
    for options, label in (
        ({}, "a"),
        ({"label_key": "level"}, 3),
        ({"input_key": "question"}, None),
    ):
        (prompt,) = load(
            "prompts", [{"question": "q", "answer": "a", "level": 3}], tokenizer, **options
        )
        assert prompt.label == label, "of a recognized format, unless a column is named"


def test_what_is_longer_than_the_limit_is_dropped_and_counted(tokenizer, caplog):
    caplog.set_level("INFO", "openppo")
    rows = [{"input": "abc"}, {"input": "abcd"}, {"input": "ab"}]  # 4, 5 and 3 tokens with BOS
    prompts = load("prompts", rows, tokenizer, prompt_max_len=4)
    assert [prompt.text for prompt in prompts] == ["abc", "ab"]
    assert (
        caplog.messages[-1]
        == "--prompt_data: 1 rows longer than --prompt_max_len were dropped, 2 are kept"
    )
    with pytest.raises(
        ValueError, match=r"all 2 rows are longer than --prompt_max_len 3; the shortest has 4"
    ):
        load("prompts", rows[:2], tokenizer, prompt_max_len=3)
    options = PromptsConfig(
        "model", "data.jsonl", prompt_max_len=2
    )  # of the commands without training
    with pytest.raises(
        ValueError, match="--eval_data: all 3 rows are longer than --prompt_max_len 2"
    ):
        load_prompts(number_rows(rows, flag="--eval_data"), tokenizer, options)
    rows = [
        {"chosen": "a", "rejected": "abc"},
        {"chosen": "abc", "rejected": "a"},
        {"chosen": "a", "rejected": "a"},
    ]
    assert len(load("pairs", rows, tokenizer, max_len=4)) == 1
    with pytest.raises(
        ValueError, match="--dataset: all 2 rows are longer than --max_len 4; the shortest has 5"
    ):
        load("pairs", rows[:2], tokenizer, max_len=4)


AB, ONE_TURN, NO_OUTPUT = (
    {"input": "ab", "output": "cd"},
    turns(user="a", assistant="b"),
    {"output_key": None},
)
MANY = {"input": "a", "output": [*turns(assistant="b"), *turns(user="c", assistant="d")]}
SIDES = {"input": turns(system="s", user="a"), "output": turns(assistant="b")}
A_TO_B = "<user>a<eos>\n<assistant>b<eos>"
MANY_TURNS = "<bos><user>a<eos>\n<assistant>«b<eos>»\n<user>c<eos>\n<assistant>«d<eos>»"
# row, columns, options, template of the tokenizer -> text with its targets in «»
EXAMPLES = {
    "text": (AB, {}, {}, None, "<bos>ab«cd<eos>»"),
    "chat, whose EOS has a newline": (
        AB,
        {},
        WITH_CHAT,
        None,
        "<bos><user>ab<eos>\n<assistant>«cd<eos>»",
    ),
    "template without EOS": (AB, {}, WITH_CHAT, WITHOUT_END, "user: ab\nassistant: «cd\n<eos>»"),
    "changed prompt": (AB, {}, WITH_CHAT, OTHER_WHEN_ASKED, "<user>ab<eos><assistant>«cd<eos>»"),
    "EOS in the response": ({"input": "ab", "output": "cd<eos>"}, {}, {}, None, "<bos>ab«cd<eos>»"),
    "empty response": ({"input": "ab", "output": ""}, {}, {}, None, "<bos>ab«<eos>»"),
    "both messages": (
        SIDES,
        {},
        WITH_CHAT,
        None,
        "<bos><system>s<eos>\n<user>a<eos>\n<assistant>«b<eos>»",
    ),
    "many turns": (MANY, {}, WITH_CHAT, None, MANY_TURNS),
    "text alone": ({"text": "ab"}, {}, {}, None, "<bos>«ab<eos>»"),
    "no output": ({"input": "ab"}, NO_OUTPUT, {"input_template": "<{}>"}, None, "<bos>«<ab><eos>»"),
    "no output, chat": ({"input": ONE_TURN}, NO_OUTPUT, WITH_CHAT, None, f"<bos>«{A_TO_B}»"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_response_and_its_end_are_targets(tokenizer, make_tokenizer, name):
    row, columns, options, template, expected = EXAMPLES[name]
    tokenizer = tokenizer if template is None else make_tokenizer(chat_template=template)
    (example,) = load("sft", [row], tokenizer, columns, **options)
    assert shown(example, tokenizer) == expected


@pytest.mark.parametrize("eos", [False, True])
def test_a_document_has_bos_and_eos_is_cut_and_trained_on_whole(make_tokenizer, eos, caplog):
    caplog.set_level("INFO", "openppo")
    tokenizer = make_tokenizer(bos=True, eos=eos)
    rows = [{"text": text} for text in ("ab", "abcd", "", "abc", " \n")]
    documents = load("documents", rows, tokenizer, {"max_len": 4})
    assert [shown(document, tokenizer) for document in documents] == [
        "<bos>«ab<eos>»",
        "<bos>«abc»",
        "<bos>«abc»",
    ]
    assert (
        caplog.messages[-1] == "--pretrain_data: of 5 documents 2 are empty, 2 are cut at 4 tokens"
    )
    for row, key in (({"content": "ab"}, None), ({"text": "x", "body": "ab"}, "body")):
        (document,) = load("documents", [row], tokenizer, {"key": key})
        assert shown(document, tokenizer) == "<bos>«ab<eos>»"
    with pytest.raises(ValueError, match="--pretrain_data: every text is empty.*pretrain_key"):
        load("documents", rows[2:3], tokenizer)


A, GOOD, BAD = turns(user="a"), turns(assistant="b"), turns(assistant="c")
ABC, WITH_PROMPT = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt_key": "prompt"}


def texts_of(row, tokenizer, columns, **options):
    (pair,) = load("pairs", [row], tokenizer, columns, **options)
    return tokenizer.decode(pair.chosen_ids), tokenizer.decode(pair.rejected_ids)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    ("row", "columns", "template", "start", "ends"),
    [
        ({"chosen": "abc", "rejected": "abd<eos>"}, {}, None, "<bos>", ("abc", "abd")),
        ({"c": "abc", "rejected": "abd"}, {"chosen_key": "c"}, None, "<bos>", ("abc", "abd")),
        (ABC, WITH_PROMPT, "Q{}", "<bos>Qa", "bc"),
        (ABC, {}, "Q{}", "<bos>Qa", "bc"),  # a prompt column is recognized
        ({**ABC, "rejected": ""}, WITH_PROMPT, None, "<bos>a", ("b", "")),
    ],
)
def test_sides_of_text_have_one_bos_and_one_eos(
    make_tokenizer, eos, row, columns, template, start, ends
):
    tokenizer = make_tokenizer(bos=True, eos=eos)
    assert texts_of(row, tokenizer, columns, input_template=template) == tuple(
        start + end + "<eos>" for end in ends
    )


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (ABC, WITH_PROMPT),
        ({"chosen": A + GOOD, "rejected": A + BAD}, {}),
        ({"prompt": "a", "chosen": GOOD, "rejected": BAD}, WITH_PROMPT),
        ({"prompt": A, "chosen": GOOD, "rejected": "c"}, WITH_PROMPT),
    ],
)
def test_conversations_turns_and_texts_give_the_same_pair(tokenizer, make_tokenizer, row, columns):
    changing = make_tokenizer(chat_template=OTHER_WHEN_ASKED)
    for used, prompt in (
        (tokenizer, "<bos><user>a<eos>\n<assistant>"),
        (changing, "<user>a<eos><assistant>"),
    ):
        assert texts_of(row, used, columns, **WITH_CHAT) == (prompt + "b<eos>", prompt + "c<eos>")


@pytest.mark.parametrize(
    ("value", "margin"),
    [
        (2, 2.0),
        ("1.5", 1.5),
        (-1, -1.0),
        *((value, None) for value in (None, "much", True, float("inf"), [1])),
    ],
)
def test_a_margin_is_a_number_or_an_error(tokenizer, value, margin):
    row, column = {"prompt": "q", "chosen": "a", "rejected": "b", "m": value}, {"margin_key": "m"}
    assert load("pairs", [row], tokenizer)[0].margin == 0.0
    if margin is None:
        with pytest.raises(
            ValueError,
            match=r"row 2 of file: the margin in column 'm' is not a number.*--margin_key",
        ):
            load("pairs", [{**row, "m": 1}, row], tokenizer, column)
    else:
        assert load("pairs", [row], tokenizer, column)[0].margin == margin


RANKED = {"prompt": "x", "responses": ["a", "b", "c"]}


def test_all_pairs_of_a_ranking_are_compared(tokenizer):
    cases = [
        ({}, RANKED, [(0, 1), (0, 2), (1, 2)]),  # the best first
        ({}, {**RANKED, "scores": [1, 2.5, "1"]}, [(1, 0), (1, 2)]),
        (
            {"prompt_key": "q", "responses_key": "n.r"},
            {"q": "x", "n": {"r": ["a", "b", "c"]}},
            [(0, 1), (0, 2), (1, 2)],
        ),
        (
            {"prompt_key": "prompt", "responses_key": "responses", "scores_key": "s"},
            {**RANKED, "s": [0, 1, 2]},
            [(1, 0), (2, 0), (2, 1)],
        ),
    ]
    for columns, row, pairs in cases:
        (example,) = load("pairs", [row], tokenizer, columns)
        assert [tokenizer.decode(ids) for ids in example.texts] == [
            "<bos>xa<eos>",
            "<bos>xb<eos>",
            "<bos>xc<eos>",
        ]
        assert sorted(example.pairs) == pairs
    (whole,) = load("pairs", [{"r": ["a", "b"]}], tokenizer, {"responses_key": "r"})
    assert [tokenizer.decode(ids) for ids in whole.texts] == ["<bos>a<eos>", "<bos>b<eos>"]
    (chat,) = load("pairs", [{**RANKED, "responses": ["b", GOOD]}], tokenizer, **WITH_CHAT)
    assert {tokenizer.decode(ids) for ids in chat.texts} == {"<bos><user>x<eos>\n<assistant>b<eos>"}
    assert (
        len(load("pairs", [RANKED, {**RANKED, "responses": ["a", "bcd"]}], tokenizer, max_len=4))
        == 1
    )


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"responses": "ab"}, {}, "not a list of two responses or more: 'ab'"),
        (
            {"responses": ["a"]},
            {},
            r"not a list of two responses or more: \['a'\]. Correct or remove the row",
        ),
        ({"scores": [1, 2]}, {}, "not one score for each of 3 responses"),
        ({"scores": [1, 1, 1]}, {}, "no response is better than another. Remove the row"),
        (
            {"scores": [1, "x", 1]},
            {},
            "the score of a response is not a number: 'x'. Correct it, or remove the row",
        ),
        ({"m": 1}, {"margin_key": "m"}, "--margin_key is about pairs, and this row is a ranking"),
    ],
)
def test_a_bad_ranking_is_an_error_that_names_its_row(tokenizer, row, columns, message):
    with pytest.raises(ValueError, match=f"^--dataset, row 1 of file: {message}"):
        load("pairs", [{**RANKED, **row}], tokenizer, columns)
