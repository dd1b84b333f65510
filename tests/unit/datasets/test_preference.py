"""Pairs for the reward model. BOS is id 2, EOS id 3."""

import pytest

from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets import load_preferences, number_rows, render_prompt

USER = {"role": "user", "content": "a"}
GOOD, BAD = {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}


def pairs_of(rows, tokenizer, columns=None, **options):
    supervised = SupervisedConfig(pretrain="model", dataset="data.jsonl", **options)
    return load_preferences(number_rows(rows), tokenizer, supervised, PreferenceConfig(**(columns or {})))


def texts_of(row, tokenizer, columns=None, **options):
    (pair,), dropped = pairs_of([row], tokenizer, columns, **options)
    assert dropped == 0
    return tokenizer.decode(pair.chosen_ids), tokenizer.decode(pair.rejected_ids)


def test_whole_texts_have_one_bos_and_one_eos(tokenizer, make_tokenizer):
    row = {"chosen": "abc", "rejected": "abd<eos>"}
    assert texts_of(row, tokenizer) == ("<bos>abc<eos>", "<bos>abd<eos>")
    assert texts_of(row, make_tokenizer(bos=True, eos=True)) == ("<bos>abc<eos>", "<bos>abd<eos>")


def test_responses_follow_the_prompt_as_generation_sees_it(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    columns = {"prompt_key": "prompt"}
    assert texts_of(row, tokenizer, columns, input_template="Q{}") == ("<bos>Qab<eos>", "<bos>Qac<eos>")
    chosen, rejected = texts_of(row, tokenizer, columns, apply_chat_template=True)
    prompt, _ = render_prompt("a", tokenizer, input_template=None, apply_chat_template=True)
    assert (chosen, rejected) == (prompt + "b<eos>", prompt + "c<eos>")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, {"prompt_key": "prompt"}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": "c"}, {"prompt_key": "prompt"}),
        ({"prompt": "a", "chosen": [{**USER, "id": 1}, GOOD], "rejected": [USER, BAD]}, {"prompt_key": "prompt"}),
    ],
)
def test_conversations_turns_and_texts_give_the_same_pair(tokenizer, row, columns):
    expected = ("<bos><user>a<eos>\n<assistant>b<eos>", "<bos><user>a<eos>\n<assistant>c<eos>")
    assert texts_of(row, tokenizer, columns, apply_chat_template=True) == expected


def test_a_conversation_of_another_prompt_is_an_error(tokenizer):
    row = {"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    with pytest.raises(
        ValueError, match=r"--dataset, row 1: column 'chosen' and its prompt: .*not start with the prompt.*--prompt_key"
    ):
        pairs_of([row], tokenizer, {"prompt_key": "prompt"}, apply_chat_template=True)


def test_empty_responses_are_pairs_too(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": ""}
    assert texts_of(row, tokenizer, {"prompt_key": "prompt"}) == ("<bos>ab<eos>", "<bos>a<eos>")


@pytest.mark.parametrize(("value", "margin"), [(2, 2.0), (0.5, 0.5), ("1.5", 1.5), (-1, -1.0)])
def test_margin_is_a_number(tokenizer, value, margin):
    row = {"chosen": "a", "rejected": "b", "m": value}
    (pair,), _ = pairs_of([row], tokenizer, {"margin_key": "m"})
    assert pair.margin == margin
    assert pairs_of([row], tokenizer)[0][0].margin == 0.0


@pytest.mark.parametrize("value", [None, "much", True, float("nan"), float("inf"), [1]])
def test_margin_that_is_no_number_is_an_error(tokenizer, value):
    rows = [{"chosen": "a", "rejected": "b", "m": 1}, {"chosen": "a", "rejected": "b", "m": value}]
    with pytest.raises(ValueError, match=r"--dataset, row 2: the margin in column 'm' is not a number.*--margin_key"):
        pairs_of(rows, tokenizer, {"margin_key": "m"})


def test_pair_with_one_side_too_long_is_dropped_and_counted(tokenizer):
    rows = [{"chosen": "a", "rejected": "abc"}, {"chosen": "abc", "rejected": "a"}, {"chosen": "a", "rejected": "b"}]
    pairs, dropped = pairs_of(rows, tokenizer, max_len=4)
    assert (len(pairs), dropped) == (1, 2)
    with pytest.raises(ValueError, match="--dataset: all 2 rows are longer than --max_len 4; the shortest has 5"):
        pairs_of(rows[:2], tokenizer, max_len=4)


@pytest.mark.parametrize(
    ("columns", "flag"),
    [
        ({"prompt_key": "p"}, "--prompt_key"),
        ({"chosen_key": "p"}, "--chosen_key"),
        ({"rejected_key": "p"}, "--rejected_key"),
        ({"margin_key": "p"}, "--margin_key"),
    ],
)
def test_a_missing_column_names_its_flag(tokenizer, columns, flag):
    with pytest.raises(
        ValueError, match=f"--dataset, row 1: no column 'p'. Its columns are chosen, rejected: .*{flag}"
    ):
        pairs_of([{"chosen": "a", "rejected": "b"}], tokenizer, columns)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"chosen": [GOOD], "rejected": "b"},
            {},
            "column 'chosen': a list of chat messages needs --apply_chat_template",
        ),
        ({"chosen": "a", "rejected": 1}, {}, "row 1: column 'rejected': not a text but int"),
        ({"chosen": "a", "rejected": "b"}, {"apply_chat_template": True}, "'chosen': a whole text cannot be split"),
        (
            {"chosen": "a", "rejected": "b"},
            {"input_template": "Q{}"},
            "--input_template goes around a prompt.*prompt_key",
        ),
        (
            {"chosen": {"from": "gpt"}, "rejected": "b"},
            {"apply_chat_template": True},
            "neither a text nor a list .* dict",
        ),
    ],
)
def test_a_bad_value_is_an_error(tokenizer, row, options, message):
    with pytest.raises(ValueError, match=message):
        pairs_of([row], tokenizer, **options)


def test_a_template_that_changes_the_prompt_gives_whole_renderings(make_tokenizer):
    tokenizer = make_tokenizer(
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>?{% endif %}"
    )
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    expected = ("<user>a<eos><assistant>b<eos>", "<user>a<eos><assistant>c<eos>")
    assert texts_of(row, tokenizer, {"prompt_key": "prompt"}, apply_chat_template=True) == expected


def test_a_prompt_column_is_recognized_beside_chosen_and_rejected(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert texts_of(row, tokenizer, input_template="Q{}") == ("<bos>Qab<eos>", "<bos>Qac<eos>")
