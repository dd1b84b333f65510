"""Rendering of prompts, and prompts of a data set. BOS is id 2, EOS id 3, <user> 4, <assistant> 5."""

import pytest

from openppo import datasets
from openppo.config import PPODataConfig, PromptsConfig
from openppo.datasets import number_rows, render_prompt

BOS, EOS, USER, ASSISTANT = 2, 3, 4, 5
HI = [{"role": "user", "content": "hi"}]


def render(value, tokenizer, template=None, chat=False):
    return render_prompt(value, tokenizer, input_template=template, apply_chat_template=chat)


def load_prompts(rows, tokenizer, **options):
    return datasets.load_prompts(number_rows(rows, "file"), tokenizer, PPODataConfig("data.jsonl", **options))


# tokenizer's additions, value, template, chat -> the tokens
RENDERED = {
    "plain": ({}, "hi", None, False, "hi"),
    "BOS of the tokenizer": ({"bos": True}, "hi", None, False, "<bos>hi"),
    "EOS of the tokenizer is removed": ({"bos": True, "eos": True}, "hi", None, False, "<bos>hi"),
    "EOS of the text stays": ({}, "hi<eos>", None, False, "hi<eos>"),
    "EOS of the text stays beside the tokenizer's": ({"eos": True}, "hi<eos>", None, False, "hi<eos>"),
    "all three": ({"bos": True, "eos": True}, "hi<eos>", None, False, "<bos>hi<eos>"),
    "BOS of the text is not doubled": ({"bos": True}, "<bos>ab", None, False, "<bos>ab"),
    "BOS inside the text stays": ({"bos": True}, "a<bos>b", None, False, "<bos>a<bos>b"),
    "template and braces": ({"bos": True}, "a{}b{x}", "Q: {}\nA:", False, "<bos>Q: a{}b{x}\nA:"),
    "chat": ({"bos": True}, HI, None, True, "<bos><user>hi<eos>\n<assistant>"),
    "text as a chat": ({"bos": True}, "hi", None, True, "<bos><user>hi<eos>\n<assistant>"),
    "template inside a chat": ({"bos": True}, "hi", "Q: {}", True, "<bos><user>Q: hi<eos>\n<assistant>"),
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_is_what_generation_starts_from(make_tokenizer, name):
    added, value, template, chat, expected = RENDERED[name]
    tokenizer = make_tokenizer(**added)
    text, ids = render(value, tokenizer, template, chat)
    assert tokenizer.decode(ids) == expected
    assert text == expected if chat else expected.endswith(text)
    if name == "chat":
        assert [ids[0], ids[1], ids[4], ids[-1]] == [BOS, USER, EOS, ASSISTANT]


@pytest.mark.parametrize(
    ("value", "chat", "template", "message"),
    [
        (HI, False, None, "messages needs --apply_chat_template"),
        (HI, True, "Q: {}", "--input_template goes around a text"),
        (None, True, None, "neither a text nor a list of chat messages but NoneType"),
        ("", False, "Q: {}", "the text is empty"),
        ([], True, None, "list of chat messages is empty"),
        ([{"from": "human", "value": "a" * 200}], True, None, r'not a chat message with texts "role" and "conten.*\.'),
    ],
)
def test_a_value_that_is_not_a_prompt_is_an_error(tokenizer, value, chat, template, message):
    with pytest.raises(ValueError, match=message):
        render(value, tokenizer, template, chat)


def test_templates_that_do_not_work_are_errors(make_tokenizer):
    for load in (render, lambda *a, chat: load_prompts([{}], a[1], apply_chat_template=chat)):  # before any row
        with pytest.raises(ValueError, match=r"^--apply_chat_template: the tokenizer of --pretrain has no chat templ"):
            load("hi", make_tokenizer(chat_template=None), chat=True)
    with pytest.raises(ValueError, match="refuses messages with the roles user: roles must alternate"):
        render("hi", make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}"), chat=True)
    with pytest.raises(ValueError, match=r"--prompt_data, row 1 of file: the text .*'a'.* has no tokens"):
        load_prompts([{"input": "a"}], make_tokenizer(chat_template="{{ '' }}"), apply_chat_template=True)


def test_prompts_keep_order_row_label_messages_and_place(tokenizer):
    rows = [{"q": "one", "a": 1}, {"q": "two", "a": None}]
    loaded = load_prompts(rows, tokenizer, input_key="q", label_key="a")
    assert [(p.text, p.label, p.row) for p in loaded.prompts] == [("one", 1, rows[0]), ("two", None, rows[1])]
    assert [(p.source, p.index, p.messages) for p in loaded.prompts] == [("file", 0, None), ("file", 1, None)]
    assert tokenizer.decode(loaded.prompts[0].token_ids) == "<bos>one"
    assert loaded.dropped == 0
    (chat,) = load_prompts(rows[:1], tokenizer, input_key="q", input_template="Q: {}", apply_chat_template=True).prompts
    assert chat.messages == [{"role": "user", "content": "Q: one"}]
    assert chat.text == "<bos><user>Q: one<eos>\n<assistant>"


@pytest.mark.parametrize(
    ("options", "label"), [({}, "a"), ({"label_key": "level"}, 3), ({"input_key": "question"}, None)]
)
def test_a_recognized_format_gives_the_label_unless_a_column_is_named(tokenizer, options, label):
    (prompt,) = load_prompts([{"question": "q", "answer": "a", "level": 3}], tokenizer, **options).prompts
    assert prompt.label == label


def test_a_prompt_longer_than_the_limit_is_dropped_and_counted(tokenizer):
    rows = [{"input": "abc"}, {"input": "abcd"}, {"input": "ab"}]  # 4, 5 and 3 tokens with BOS
    loaded = load_prompts(rows, tokenizer, prompt_max_len=4)
    assert ([prompt.text for prompt in loaded.prompts], loaded.dropped) == (["abc", "ab"], 1)
    with pytest.raises(ValueError, match=r"all 2 rows are longer than --prompt_max_len 3; the shortest has 4"):
        load_prompts(rows[:2], tokenizer, prompt_max_len=3)
    options = PromptsConfig("model", "data.jsonl", prompt_max_len=2)  # of the commands without training
    with pytest.raises(ValueError, match="--eval_data: all 3 rows are longer than --prompt_max_len 2"):
        datasets.load_prompts(number_rows(rows), tokenizer, options, flag="--eval_data")
