"""Solutions with judged steps. One token per character; 'K' stands for the placeholder, BOS is id 2."""

import pytest

from openppo.datasets import number_rows
from tests.unit.datasets.loaders import WITH_CHAT, load

K, STEPS = {"placeholder_token": "K"}, [("sK", "+"), ("tK", "-")]
LISTS, TWO = {"question": "q", "steps": ["s", "t"], "labels": ["+", "-"]}, "q s K\nt K"


def judged(row, tokenizer, columns=None, **options):
    """The text, and at each label its token before the placeholder, the placeholder, and what is there for it."""
    (example,) = load("steps", [row], tokenizer, {**K, **(columns or {})}, **options)
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids)
    labels = [
        (
            tokens[t - 1] + tokens[t],
            tokenizer.convert_ids_to_tokens(label) if isinstance(label, int) else label,
        )
        for t, label in enumerate(example.labels)
        if label != -100
    ]
    return tokenizer.decode(example.token_ids), labels


@pytest.mark.parametrize(
    ("solution", "label"),
    [
        *((TWO, "q s +\nt -"), ("q sK\nt   K after", "q s+\nt   - after")),
        *((TWO, ["+", "-"]), (TWO, [True, False]), (TWO, [0.25, 1])),
    ],
)
def test_judgements_stand_at_the_placeholders_right_after_their_steps(tokenizer, solution, label):
    """Numbers are soft labels."""
    expected = [("sK", 0.25), ("tK", 1.0)] if label[0] == 0.25 else STEPS
    assert judged({"input": solution, "label": label}, tokenizer) == ("<bos>q sK\ntK", expected)


def test_rows_of_other_trainers_are_read_as_they_are(tokenizer):
    openrlhf = {"inputs": "q s K\nt K", "labels": ["+", "-"]}
    trl = {"prompt": "q", "completions": ["s", "t"], "labels": [True, False]}
    assert judged(openrlhf, tokenizer) == judged({"input": TWO, "label": "q s +\nt -"}, tokenizer)
    assert judged({"inputs": TWO, "labels": "q s +\nt -"}, tokenizer) == judged(openrlhf, tokenizer)
    assert judged(trl, tokenizer) == judged(LISTS, tokenizer)


def test_a_list_of_steps_follows_its_question(tokenizer, make_tokenizer):
    assert judged(LISTS, tokenizer) == ("<bos>q\n\nsK\n\ntK", STEPS)
    assert judged(LISTS, tokenizer, input_template="Q{}A") == ("<bos>QqAsK\n\ntK", STEPS)
    assert judged(LISTS, tokenizer, **WITH_CHAT) == (
        "<bos><user>q<eos>\n<assistant>sK\n\ntK",
        STEPS,
    )
    refusing = "{% for m in messages %}{{ m.content or raise_exception('empty') }}{% endfor %}"
    without_first = {**LISTS, "steps": ["", "t"]}
    assert (
        judged(without_first, make_tokenizer(chat_template=refusing), **WITH_CHAT)[0] == "qK\n\ntK"
    )


def test_named_columns_may_hold_texts_or_lists(tokenizer):
    columns = {"input_key": "text", "label_key": "marks"}
    assert judged({"text": "s Kt K", "marks": ["+", "-"]}, tokenizer, columns)[1] == STEPS
    assert judged({"text": ["s", "t"], "marks": [True, False]}, tokenizer, columns)[1] == STEPS
    with pytest.raises(
        ValueError, match=r"row 1 of file: no column 'marks'. Its columns are text: .*--label_key"
    ):
        judged({"text": "s K"}, tokenizer, columns)


@pytest.mark.parametrize(
    ("solution", "label", "options", "message"),
    [
        ("s K t K", ["+"], {}, "2 steps and 1 judgements"),
        ("s t", ["+"], {}, "no placeholder 'K' in the solution.*--placeholder_token"),
        ("s K", "s ?", {}, r"not the solution with one of --reward_tokens \+ - in place"),
        ("s K", "t +", {}, "not the solution with one of --reward_tokens"),
        ("s K", ["?"], {}, r"\['\?'\] are not all of --reward_tokens \+ -"),
        ("s K t K", ["+", 1], {}, "are not all of --reward_tokens"),
        ("s K", [1.5], {}, r"must lie in \[0, 1\] and need exactly two --reward_tokens"),
        ("s K", [0.5], {}, "some rows are judged by numbers and some by reward tokens"),
        ("s K", 1, {}, "neither a text nor a list: 1"),
        (3, ["+"], {}, "not a text but int"),
        ("s K", ["+"], {"input_template": "Q{}"}, "holds its question too.*--input_template out"),
    ],
)
def test_a_bad_row_is_an_error_that_names_it(tokenizer, solution, label, options, message):
    good, bad = (
        LISTS if options else {"input": "s K", "label": ["+"]},
        {"input": solution, "label": label},
    )
    rows = [*number_rows([good], "good"), *number_rows([bad], "bad")]
    with pytest.raises(ValueError, match=f"--dataset, row 1 of bad: .*{message}"):
        load("steps", rows, tokenizer, K, **options)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"placeholder_token": "ж"}, "--placeholder_token 'ж' is not in the vocabulary"),
        (
            {"placeholder_token": "ab"},
            "--placeholder_token 'ab' is 2 tokens of the tokenizer of --pretrain",
        ),
        (
            {"reward_tokens": ("+", "no")},
            "--reward_tokens 'no' is 2 tokens .*Choose another with --reward_tokens",
        ),
    ],
)
def test_tokens_must_be_single_tokens_of_the_tokenizer(tokenizer, columns, message):
    with pytest.raises(ValueError, match=message):
        load("steps", [{"input": "s", "label": "s"}], tokenizer, {**K, **columns})
