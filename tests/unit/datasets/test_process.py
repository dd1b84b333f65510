"""Solutions with judged steps. One token per character; 'K' stands for the placeholder, BOS is id 2."""

import pytest

from openppo.config import ProcessConfig, SupervisedConfig
from openppo.datasets import load_process_examples, number_rows


def examples_of(rows, tokenizer, columns=None, **options):
    supervised = SupervisedConfig("model", "data.jsonl", **options)
    data = ProcessConfig(placeholder_token="K", **(columns or {}))
    return load_process_examples(number_rows(rows), tokenizer, supervised, data)


def judged(row, tokenizer, columns=None, **options):
    """The text, and at each label its token before the placeholder, the placeholder, and what is there for it."""
    (example,), dropped = examples_of([row], tokenizer, columns, **options)
    assert dropped == 0
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    labels = [
        (tokens[t - 1] + tokens[t], tokenizer.convert_ids_to_tokens(label) if isinstance(label, int) else label)
        for t, label in enumerate(example.labels)
        if label != -100
    ]
    return tokenizer.decode(example.token_ids), labels


STEPS = [("sK", "+"), ("tK", "-")]


@pytest.mark.parametrize(
    "row",
    [
        {"input": "q s K\nt K", "label": "q s +\nt -"},
        {"input": "q sK\nt   K after", "label": "q s+\nt   - after"},
        {"input": "q s K\nt K", "label": ["+", "-"]},
        {"input": "q s K\nt K", "label": [True, False]},
        {"input": "q s K\nt K", "label": [0.25, 1]},
    ],
)
def test_judgements_stand_at_the_placeholders_right_after_their_steps(tokenizer, row):
    """Numbers are soft labels."""
    expected = [("sK", 0.25), ("tK", 1.0)] if row["label"][0] == 0.25 else STEPS
    assert judged(row, tokenizer) == ("<bos>q sK\ntK", expected)


def test_a_list_of_steps_follows_its_question(tokenizer):
    row = {"question": "q", "steps": ["s", "t"], "labels": ["+", "-"]}
    assert judged(row, tokenizer) == ("<bos>q\n\nsK\n\ntK", STEPS)
    assert judged(row, tokenizer, input_template="Q{}A") == ("<bos>QqAsK\n\ntK", STEPS)
    chat = "<bos><user>q<eos>\n<assistant>sK\n\ntK"
    assert judged(row, tokenizer, apply_chat_template=True) == (chat, STEPS)


def test_a_first_step_without_text_is_no_turn_that_a_template_could_refuse(make_tokenizer):
    refusing = "{% for m in messages %}{{ m.content or raise_exception('empty') }}{% endfor %}"
    row = {"question": "q", "steps": ["", "t"], "labels": ["+", "-"]}
    assert judged(row, make_tokenizer(chat_template=refusing), apply_chat_template=True)[0] == "qK\n\ntK"


def test_named_columns_may_hold_texts_or_lists(tokenizer):
    columns = {"input_key": "text", "label_key": "marks"}
    assert judged({"text": "s Kt K", "marks": ["+", "-"]}, tokenizer, columns)[1] == STEPS
    assert judged({"text": ["s", "t"], "marks": [True, False]}, tokenizer, columns)[1] == STEPS
    with pytest.raises(ValueError, match=r"row 1: no column 'marks'. Its columns are text: .*--label_key"):
        examples_of([{"text": "s K"}], tokenizer, columns)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"input": "s K t K", "label": ["+"]}, {}, "2 steps and 1 judgements"),
        ({"input": "s t", "label": ["+"]}, {}, "no placeholder 'K' in the solution.*--placeholder_token"),
        ({"input": "s K", "label": "s ?"}, {}, r"not the solution with one of --reward_tokens \+ - in place"),
        ({"input": "s K", "label": "t +"}, {}, "not the solution with one of --reward_tokens"),
        ({"input": "s K", "label": ["?"]}, {}, r"\['\?'\] are not all of --reward_tokens \+ -"),
        ({"input": "s K t K", "label": ["+", 1]}, {}, "are not all of --reward_tokens"),
        ({"input": "s K", "label": [1.5]}, {}, r"must lie in \[0, 1\] and need exactly two --reward_tokens"),
        ({"input": "s K", "label": [0.5]}, {}, "some rows are judged by numbers and some by reward tokens"),
        ({"input": "s K", "label": 1}, {}, "neither a text nor a list: 1"),
        ({"input": 3, "label": ["+"]}, {}, "not a text but int"),
        ({"input": "s K", "label": ["+"]}, {"input_template": "Q{}"}, "holds its question too.*--input_template out"),
    ],
)
def test_a_bad_row_is_an_error_that_names_it(tokenizer, row, options, message):
    good = {"question": "q", "steps": ["s"], "labels": ["+"]} if options else {"input": "s K", "label": ["+"]}
    rows = [*number_rows([good], "good"), *number_rows([row], "bad")]
    supervised = SupervisedConfig("model", "data.jsonl", **options)
    with pytest.raises(ValueError, match=f"--dataset, row 1 of bad: .*{message}"):
        load_process_examples(rows, tokenizer, supervised, ProcessConfig(placeholder_token="K"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"placeholder_token": "ж"}, "--placeholder_token 'ж' is not in the vocabulary"),
        ({"placeholder_token": "ab"}, "--placeholder_token 'ab' is 2 tokens of the tokenizer of --pretrain"),
        ({"reward_tokens": ("+", "no")}, "--reward_tokens 'no' is 2 tokens .*Choose another with --reward_tokens"),
    ],
)
def test_tokens_must_be_single_tokens_of_the_tokenizer(tokenizer, columns, message):
    data = ProcessConfig(**{"placeholder_token": "K", **columns})
    with pytest.raises(ValueError, match=message):
        load_process_examples(number_rows([{"input": "s", "label": "s"}]), tokenizer, SupervisedConfig("m", "d"), data)
