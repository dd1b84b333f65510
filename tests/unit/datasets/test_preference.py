"""Pairs for the reward model. BOS is id 2, EOS id 3."""

import pytest

from openppo.config import PreferenceConfig, SupervisedConfig
from openppo.datasets import load_preferences, number_rows, render_prompt

USER = {"role": "user", "content": "a"}
GOOD, BAD = {"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"}
ABC, WITH_PROMPT, CHAT = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt_key": "prompt"}, True
CHANGES_THE_PROMPT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>?{% endif %}"
)


def pairs_of(rows, tokenizer, columns=None, **options):
    supervised = SupervisedConfig(pretrain="model", dataset="data.jsonl", **options)
    return load_preferences(number_rows(rows), tokenizer, supervised, PreferenceConfig(**(columns or {})))


def texts_of(row, tokenizer, columns=None, **options):
    (pair,), dropped = pairs_of([row], tokenizer, columns, **options)
    assert dropped == 0
    return tokenizer.decode(pair.chosen_ids), tokenizer.decode(pair.rejected_ids)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    ("row", "columns", "template", "start", "ends"),
    [
        ({"chosen": "abc", "rejected": "abd<eos>"}, {}, None, "<bos>", ("abc", "abd")),
        ({"prompt": "x", "c": "abc", "rejected": "abd"}, {"chosen_key": "c"}, None, "<bos>", ("abc", "abd")),
        (ABC, WITH_PROMPT, "Q{}", "<bos>Qa", "bc"),
        (ABC, {}, "Q{}", "<bos>Qa", "bc"),  # a prompt column is recognized
        ({**ABC, "rejected": ""}, WITH_PROMPT, None, "<bos>a", ("b", "")),
    ],
)
def test_texts_have_one_bos_and_one_eos(make_tokenizer, eos, row, columns, template, start, ends):
    tokenizer = make_tokenizer(bos=True, eos=eos)
    assert texts_of(row, tokenizer, columns, input_template=template) == tuple(start + end + "<eos>" for end in ends)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (ABC, WITH_PROMPT),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "a", "chosen": [GOOD], "rejected": [BAD]}, WITH_PROMPT),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": "c"}, WITH_PROMPT),
        ({"prompt": "a", "chosen": [{**USER, "id": 1}, GOOD], "rejected": [USER, BAD]}, WITH_PROMPT),
    ],
)
def test_conversations_turns_and_texts_give_the_same_pair(tokenizer, make_tokenizer, row, columns):
    prompt, _ = render_prompt("a", tokenizer, input_template=None, apply_chat_template=True)
    assert prompt == "<bos><user>a<eos>\n<assistant>"
    assert texts_of(row, tokenizer, columns, apply_chat_template=True) == (prompt + "b<eos>", prompt + "c<eos>")
    changing = make_tokenizer(chat_template=CHANGES_THE_PROMPT)
    expected = ("<user>a<eos><assistant>b<eos>", "<user>a<eos><assistant>c<eos>")
    assert texts_of(row, changing, columns, apply_chat_template=True) == expected


@pytest.mark.parametrize(
    ("value", "margin"),
    [(2, 2.0), ("1.5", 1.5), (-1, -1.0), *((value, None) for value in (None, "much", True, float("inf"), [1]))],
)
def test_a_margin_is_a_number_or_an_error(tokenizer, value, margin):
    row = {"chosen": "a", "rejected": "b", "m": value}
    assert pairs_of([row], tokenizer)[0][0].margin == 0.0
    if margin is None:
        message = r"row 2: the margin in column 'm' is not a number.*--margin_key"
        with pytest.raises(ValueError, match=message):
            pairs_of([{**row, "m": 1}, row], tokenizer, {"margin_key": "m"})
        return
    (pair,), _ = pairs_of([row], tokenizer, {"margin_key": "m"})
    assert pair.margin == margin


def test_long_pairs_are_dropped_and_equal_ones_kept_and_counted(tokenizer, caplog):
    caplog.set_level("INFO", "openppo")
    rows = [{"chosen": "a", "rejected": "abc"}, {"chosen": "abc", "rejected": "a"}, {"chosen": "a", "rejected": "a"}]
    pairs, dropped = pairs_of(rows, tokenizer, max_len=4)
    assert (len(pairs), dropped) == (1, 2)
    assert caplog.messages[-1] == "--dataset: in 1 of 3 pairs both sides are the same, which teaches nothing"
    with pytest.raises(ValueError, match="--dataset: all 2 rows are longer than --max_len 4; the shortest has 5"):
        pairs_of(rows[:2], tokenizer, max_len=4)


AB, TEMPLATE = {"chosen": "a", "rejected": "b"}, {"apply_chat_template": True}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"chosen": [GOOD], "rejected": "b"}, {}, "'chosen': a list of chat messages needs --apply_chat_template"),
        ({"chosen": "a", "rejected": 1}, {}, "row 1: column 'rejected': not a text but int"),
        (AB, TEMPLATE, "'chosen': a whole text cannot be split"),
        (AB, {"input_template": "Q{}"}, "--input_template goes around a prompt.*prompt_key"),
        ({"chosen": {"from": "gpt"}, "rejected": "b"}, TEMPLATE, "neither a text nor a list .* dict"),
        (
            {"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {"columns": WITH_PROMPT, **TEMPLATE},
            "--dataset, row 1: column 'chosen' and its prompt: .*not start with the prompt.*--prompt_key",
        ),
    ],
)
def test_a_bad_value_is_an_error(tokenizer, row, options, message):
    with pytest.raises(ValueError, match=message):
        pairs_of([row], tokenizer, **options)
