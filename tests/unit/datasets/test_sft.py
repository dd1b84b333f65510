"""Examples of the language-model loss. BOS is id 2, EOS id 3."""

import logging

import pytest

from openppo import datasets
from openppo.config import SFTDataConfig, SupervisedConfig
from openppo.datasets import TokenExample, load_sft_examples, number_rows, render_prompt

BOS, EOS = 2, 3
CHANGING_TEMPLATE = (  # the prompt of a generation ends in '?', which a finished turn lacks
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>?{% endif %}"
)


def examples_of(rows, tokenizer, output_key="output", **options):
    supervised = SupervisedConfig(pretrain="model", dataset="data.jsonl", **options)
    return load_sft_examples(number_rows(rows), tokenizer, supervised, SFTDataConfig(output_key=output_key))


def load_documents(rows, tokenizer, key, max_len):
    return datasets.load_documents(number_rows(rows), tokenizer, key, max_len)


def only_example(row, tokenizer, **options):
    (example,), dropped = examples_of([row], tokenizer, **options)
    assert dropped == 0
    return example


def targets(example, tokenizer):
    chosen = [token for token, target in zip(example.token_ids, example.loss_mask, strict=True) if target]
    return tokenizer.decode(chosen)


def test_plain_example_is_prompt_response_and_eos_with_loss_on_the_latter_two(tokenizer):
    example = only_example({"input": "ab", "output": "cd"}, tokenizer)
    assert tokenizer.decode(example.token_ids) == "<bos>abcd<eos>"
    assert example.loss_mask == [False] * 3 + [True] * 3


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("added", [{}, {"bos": True}, {"bos": True, "eos": True}])
def test_example_starts_with_exactly_the_ids_that_generation_sees(make_tokenizer, chat, added):
    tokenizer = make_tokenizer(**added)
    example = only_example({"input": "ab", "output": "cd"}, tokenizer, input_template="Q: {}", apply_chat_template=chat)
    _, prompt = render_prompt("ab", tokenizer, input_template="Q: {}", apply_chat_template=chat)
    assert example.token_ids[: len(prompt)] == prompt
    assert targets(example, tokenizer) == "cd<eos>"
    assert example.loss_mask.index(True) == len(prompt)


def test_chat_example_ends_with_the_eos_of_the_turn_not_with_the_newline_after_it(tokenizer):
    example = only_example({"input": "ab", "output": "cd"}, tokenizer, apply_chat_template=True)
    assert tokenizer.decode(example.token_ids) == "<bos><user>ab<eos>\n<assistant>cd<eos>"


def test_chat_template_that_leaves_a_turn_open_gets_an_eos(make_tokenizer):
    tokenizer = make_tokenizer(
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    example = only_example({"input": "ab", "output": "cd"}, tokenizer, apply_chat_template=True)
    assert targets(example, tokenizer) == "cd\n<eos>"


def test_messages_as_prompt_and_response_are_rendered_as_one_conversation(tokenizer):
    row = {
        "input": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
        "output": [{"role": "assistant", "content": "b"}],
    }
    example = only_example(row, tokenizer, apply_chat_template=True)
    assert tokenizer.decode(example.token_ids) == "<bos><system>s<eos>\n<user>a<eos>\n<assistant>b<eos>"
    assert targets(example, tokenizer) == "b<eos>"


def test_eos_in_the_response_itself_is_not_doubled(tokenizer):
    example = only_example({"input": "ab", "output": "cd<eos>"}, tokenizer)
    assert targets(example, tokenizer) == "cd<eos>"


def test_empty_response_trains_the_eos_alone(tokenizer):
    assert targets(only_example({"input": "ab", "output": ""}, tokenizer), tokenizer) == "<eos>"


def test_template_that_changes_the_prompt_still_gives_its_own_rendering(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=CHANGING_TEMPLATE)
    example = only_example({"input": "ab", "output": "cd"}, tokenizer, apply_chat_template=True)
    assert tokenizer.decode(example.token_ids) == "<user>ab<eos><assistant>cd<eos>"
    assert targets(example, tokenizer) == "cd<eos>"


def test_of_a_response_of_many_turns_the_assistants_are_targets(tokenizer):
    turns = [{"role": role, "content": text} for role, text in (("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    example = only_example({"input": "a", "output": turns}, tokenizer, apply_chat_template=True)
    assert tokenizer.decode(example.token_ids).endswith("<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>")
    assert targets(example, tokenizer) == "b<eos>d<eos>"


def test_a_text_alone_is_trained_on_whole(tokenizer):
    (example,), _ = examples_of([{"text": "ab"}], tokenizer)
    assert example.loss_mask == [False, True, True, True]


def test_without_output_key_all_tokens_after_the_first_are_targets(tokenizer):
    example = only_example({"input": "ab"}, tokenizer, output_key=None, input_template="<{}>")
    assert tokenizer.decode(example.token_ids) == "<bos><ab><eos>"
    assert example.loss_mask == [False] + [True] * 5


def test_without_output_key_a_conversation_is_rendered_whole(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = only_example({"input": messages}, tokenizer, output_key=None, apply_chat_template=True)
    assert tokenizer.decode(example.token_ids) == "<bos><user>a<eos>\n<assistant>b<eos>"


def test_example_longer_than_the_limit_is_dropped_and_counted(tokenizer):
    rows = [{"input": "ab", "output": "cd"}, {"input": "ab", "output": "c"}]  # 6 and 5 tokens with BOS and EOS
    examples, dropped = examples_of(rows, tokenizer, max_len=5)
    assert [len(example.token_ids) for example in examples] == [5]
    assert dropped == 1
    with pytest.raises(ValueError, match="--dataset: all 2 rows are longer than --max_len 4; the shortest has 5"):
        examples_of(rows, tokenizer, max_len=4)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"input": "a", "output": 3}, {}, "--dataset, row 2: not a text but int"),
        ({"input": "", "output": "a"}, {}, "--dataset, row 2: the text is empty"),
        ({"input": "a", "output": None}, {"apply_chat_template": True}, "row 2: neither a text nor a list"),
        ({"input": "a"}, {}, "row 2: no column 'output' or .* Its columns are input: .*--output_key"),
        ({"output": "a"}, {}, "row 2: no column 'input' or .*--input_key"),
        ({"input": "a"}, {"output_key": None, "apply_chat_template": True}, "row 1: a whole text cannot be split"),
    ],
)
def test_a_bad_row_is_an_error_that_names_flag_and_row(tokenizer, row, options, message):
    with pytest.raises(ValueError, match=message):
        examples_of([{"input": "a", "output": "b"}, row], tokenizer, **options)


def test_a_tokenizer_without_eos_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match="the tokenizer of --pretrain has no EOS token"):
        examples_of([{"input": "a", "output": "b"}], make_tokenizer(has_eos=False))


def test_lists_of_unequal_length_are_our_mistake():
    with pytest.raises(AssertionError, match="unequal length"):
        TokenExample([1, 2], [True])


def test_document_has_bos_and_eos_and_every_token_after_the_first_is_a_target(tokenizer):
    (document,) = load_documents([{"text": "ab"}], tokenizer, "text", max_len=9)
    assert tokenizer.decode(document.token_ids) == "<bos>ab<eos>"
    assert document.loss_mask == [False, True, True, True]


@pytest.mark.parametrize(("max_len", "expected"), [(3, "<bos>ab"), (4, "<bos>abc"), (5, "<bos>abc<eos>")])
def test_document_is_cut_at_the_limit(make_tokenizer, max_len, expected):
    tokenizer = make_tokenizer(bos=True, eos=True)
    (document,) = load_documents([{"text": "abc"}], tokenizer, "text", max_len)
    assert tokenizer.decode(document.token_ids) == expected


def test_documents_that_are_cut_are_counted_in_the_log(tokenizer, caplog):
    rows = [{"text": "ab"}, {"text": "abcdefgh"}, {"text": "abcdefg"}]
    with caplog.at_level(logging.INFO):
        load_documents(rows, tokenizer, "text", 4)
    assert caplog.records[-1].getMessage() == "--pretrain_data: 2 of 3 documents are cut at 4 tokens."


def test_the_text_of_documents_is_recognized_or_named(tokenizer):
    for rows, key in (([{"content": "ab"}], None), ([{"text": "x", "body": "ab"}], "body")):
        (document,) = load_documents(rows, tokenizer, key, max_len=9)
        assert tokenizer.decode(document.token_ids) == "<bos>ab<eos>"
    with pytest.raises(ValueError, match=r"--pretrain_data: .*Its columns are title: name .* with --pretrain_key"):
        load_documents([{"title": "x"}], tokenizer, None, max_len=9)


def test_empty_documents_are_left_out(tokenizer):
    rows = [{"text": ""}, {"text": "ab"}, {"text": " \n"}]
    assert len(load_documents(rows, tokenizer, "text", max_len=9)) == 1
    with pytest.raises(ValueError, match="--pretrain_data: every text is empty.*--pretrain_key"):
        load_documents(rows[:1], tokenizer, "text", max_len=9)


def test_a_document_that_is_no_text_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="--pretrain_data, row 2: not a text but NoneType"):
        load_documents([{"text": "a"}, {"text": None}], tokenizer, "text", max_len=9)
    with pytest.raises(ValueError, match=r"--pretrain_data, row 1: no column 'input'.*--pretrain_key"):
        load_documents([{"text": "a"}], tokenizer, "input", max_len=9)
