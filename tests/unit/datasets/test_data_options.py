"""Options of rows: prompts cut to a length, nested columns, schemas of tools, a chat template of one's own."""

import json

import pytest
from transformers import AutoTokenizer

from openppo.models.pretrained import load_tokenizer
from tests.unit.datasets.loaders import ENDS_IN_EOS, WITH_CHAT, load, targets, turns

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@pytest.mark.parametrize(
    ("bos", "how", "expected"),
    [
        (False, "left", "efghi"),
        (False, "right", "abcde"),
        (False, "middle", "abghi"),
        (True, "left", "<bos>fghi"),
        (True, "right", "<bos>abcd"),
        (True, "middle", "<bos>abhi"),
    ],
)
def test_a_long_prompt_is_cut_where_told_and_keeps_bos(make_tokenizer, caplog, bos, how, expected):
    caplog.set_level("INFO", "openppo")
    tokenizer, limit = make_tokenizer(bos=bos), {"prompt_max_len": 5, "prompt_truncation": how}
    cut, short = load("prompts", [{"input": "abcdefghi"}, {"input": "abc"}], tokenizer, **limit)
    assert (len(cut.token_ids), tokenizer.decode(cut.token_ids), cut.text) == (
        5,
        expected,
        expected,
    )
    assert (short.text, cut.row, cut.index, short.index) == ("abc", {"input": "abcdefghi"}, 0, 1)
    assert (
        caplog.messages[-1]
        == f"--prompt_data: of 2 prompts 1 were cut to --prompt_max_len 5 ({how})"
    )
    assert caplog.messages[-1] not in [m for m in caplog.messages[:-1] if "dropped" in m]


def test_a_long_prompt_may_be_an_error_and_a_cut_one_keeps_its_messages(tokenizer):
    with pytest.raises(
        ValueError, match=r"row 2 of file: 5 tokens, above --prompt_max_len 4: raise it"
    ):
        load(
            "prompts",
            [{"input": "abc"}, {"input": "abcd"}],
            tokenizer,
            prompt_max_len=4,
            prompt_truncation="error",
        )
    limit = {"prompt_max_len": 4, "prompt_truncation": "left", **WITH_CHAT}
    (prompt,) = load("prompts", [{"messages": turns(user="abcd")}], tokenizer, **limit)
    assert (prompt.text, prompt.messages) == ("<bos><eos>\n<assistant>", turns(user="abcd"))


NESTED = {
    "a": {"b": {"c": "deep"}, "b.c": "column with a dot", "n": None},
    "a.b.x": "whole",
    "q": "hi",
    "u": {"v": {"w": 1}},
    "u.v": {"w": 2},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a.b.c", "column with a dot"),
        ("a.b", {"c": "deep"}),
        ("a.n", None),
        ("a.b.x", "whole"),
        ("u.v.w", 2),
    ],
)
def test_dots_descend_and_the_longest_name_wins(tokenizer, key, value):
    (prompt,) = load("prompts", [NESTED], tokenizer, input_key="q", label_key=key)
    assert prompt.label == value


def test_every_key_may_be_nested(tokenizer):
    row = {"d": {"q": "a", "r": "b", "l": "L", "m": 2, "s": [True]}, "e": {"q": None}}
    (prompt,) = load("prompts", [row], tokenizer, input_key="d.q", label_key="d.l")
    (example,) = load("sft", [row], tokenizer, {"input_key": "d.q", "output_key": "d.r"})
    sides = {"prompt_key": "d.q", "chosen_key": "d.r", "rejected_key": "d.l", "margin_key": "d.m"}
    (pair,) = load("pairs", [row], tokenizer, sides)
    (document,) = load("documents", [row], tokenizer, {"key": "d.q"})
    (judged,) = load(
        "steps",
        [{"d": {"t": "aK", "s": [True]}}],
        tokenizer,
        {"input_key": "d.t", "label_key": "d.s", "placeholder_token": "K"},
    )
    read = [
        prompt.token_ids,
        example.token_ids,
        pair.chosen_ids,
        pair.rejected_ids,
        document.token_ids,
        judged.token_ids,
    ]
    assert list(map(tokenizer.decode, read)) == [
        "<bos>a",
        "<bos>ab<eos>",
        "<bos>ab<eos>",
        "<bos>aL<eos>",
        "<bos>a<eos>",
        "<bos>aK",
    ]
    assert (prompt.label, pair.margin) == ("L", 2.0)
    with pytest.raises(ValueError, match="row 1 of file: the prompt in column 'e.q' is null"):
        load("pairs", [row], tokenizer, {**sides, "prompt_key": "e.q"})
    with pytest.raises(
        ValueError,
        match=r"no column 'd.z'. Its columns are d, e: name one of them with --label_key",
    ):
        load("prompts", [row], tokenizer, input_key="d.q", label_key="d.z")


@pytest.mark.parametrize("given", [[ADD], json.dumps([ADD])], ids=["list", "text"])
def test_a_template_offers_the_tools_of_each_row(assets, given):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers/qwen2.5")
    chat, options = turns(user="1 + 2?", assistant="Three."), {"tools_key": "x.tools", **WITH_CHAT}
    rows = [{"messages": chat, "x": {"tools": tools}} for tools in (given, None, [])]
    written = [
        tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        for tools in ([ADD], None, None)
    ]
    assert '"name": "add"' in written[0] and '"name": "add"' not in written[1]
    examples = load("sft", rows, tokenizer, **options)
    assert [tokenizer.decode(example.token_ids) + "\n" for example in examples] == written
    assert {targets(example, tokenizer) for example in examples} == {"Three.<|im_end|>"}
    prompts = load("prompts", rows, tokenizer, **options)
    asked = tokenizer.apply_chat_template(
        chat[:1], tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    assert (prompts[0].text, tokenizer.decode(prompts[0].token_ids)) == (asked, asked)
    pair = {"chosen": chat, "rejected": turns(user="1 + 2?", assistant="4"), "x": {"tools": given}}
    (sides,) = load("pairs", [pair], tokenizer, **options)
    assert tokenizer.decode(sides.chosen_ids) == written[0].rstrip("\n")
    judged = {"prompt": "1 + 2?", "steps": ["Three."], "labels": [True], "x": {"tools": given}}
    (solution,) = load("steps", [judged], tokenizer, {"placeholder_token": "!"}, **options)
    assert tokenizer.decode(solution.token_ids) == asked + "Three.!"


def test_tools_that_no_template_could_write_are_errors(tokenizer, make_tokenizer):
    row = {"messages": turns(user="a", assistant="b"), "tools": [ADD]}
    for task in ("prompts", "sft"):
        with pytest.raises(
            ValueError, match="row 1 of file: the chat template writes no tools.*--chat_template"
        ):
            load(task, [row], tokenizer, tools_key="tools", **WITH_CHAT)
    writes = make_tokenizer(chat_template="{{ tools }}" + ENDS_IN_EOS)
    for wrong in ("add", ["add"], {"add": 1}, [{"type": "function"}]):
        with pytest.raises(
            ValueError, match="row 1 of file: the tools in column 'tools' are not a list of objects"
        ):
            load("prompts", [{**row, "tools": wrong}], writes, tools_key="tools", **WITH_CHAT)


def test_arguments_of_the_template_may_be_tools(assets):
    tokenizer = load_tokenizer(
        str(assets / "tokenizers/qwen2.5"), "--pretrain", template_kwargs={"tools": [ADD]}
    )
    (prompt,) = load("prompts", [{"messages": turns(user="1 + 2?")}], tokenizer, **WITH_CHAT)
    assert '"name": "add"' in prompt.text
