"""Examples of the language-model loss. BOS is id 2, EOS id 3."""

import logging

import pytest

from openppo import datasets
from openppo.config import SFTDataConfig, SupervisedConfig
from openppo.datasets import load_sft_examples, number_rows

CHANGES_THE_PROMPT = (  # the prompt of a generation ends in '?', which a finished turn lacks
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>?{% endif %}"
)
LEAVES_TURNS_OPEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
AB, CHAT = {"input": "ab", "output": "cd"}, {"apply_chat_template": True}


def turns(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


def examples_of(rows, tokenizer, output_key="output", **options):
    supervised = SupervisedConfig(pretrain="model", dataset="data.jsonl", **options)
    return load_sft_examples(number_rows(rows), tokenizer, supervised, SFTDataConfig(output_key=output_key))


def documents_of(rows, tokenizer, key="text", max_len=9):
    return datasets.load_documents(number_rows(rows), tokenizer, key, max_len)


def targets(example, tokenizer):
    chosen = [token for token, target in zip(example.token_ids, example.loss_mask, strict=True) if target]
    return tokenizer.decode(chosen)


# row, options, template of the tokenizer -> text, targets
EXAMPLES = {
    "text": (AB, {}, None, "<bos>abcd<eos>", "cd<eos>"),
    "chat, whose EOS has a newline after it": (AB, CHAT, None, "<bos><user>ab<eos>\n<assistant>cd<eos>", "cd<eos>"),
    "template without EOS": (AB, CHAT, LEAVES_TURNS_OPEN, "user: ab\nassistant: cd\n<eos>", "cd\n<eos>"),
    "template that changes the prompt": (AB, CHAT, CHANGES_THE_PROMPT, "<user>ab<eos><assistant>cd<eos>", "cd<eos>"),
    "EOS in the response": ({"input": "ab", "output": "cd<eos>"}, {}, None, "<bos>abcd<eos>", "cd<eos>"),
    "empty response": ({"input": "ab", "output": ""}, {}, None, "<bos>ab<eos>", "<eos>"),
    "messages on both sides": (
        {"input": turns(("system", "s"), ("user", "a")), "output": turns(("assistant", "b"))},
        CHAT,
        None,
        "<bos><system>s<eos>\n<user>a<eos>\n<assistant>b<eos>",
        "b<eos>",
    ),
    "response of many turns": (
        {"input": "a", "output": turns(("assistant", "b"), ("user", "c"), ("assistant", "d"))},
        CHAT,
        None,
        "<bos><user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>",
        "b<eos>d<eos>",
    ),
    "text alone": ({"text": "ab"}, {}, None, "<bos>ab<eos>", "ab<eos>"),
    "no output_key": (
        {"input": "ab"},
        {"output_key": None, "input_template": "<{}>"},
        None,
        "<bos><ab><eos>",
        "<ab><eos>",
    ),
    "no output_key, chat": (
        {"input": turns(("user", "a"), ("assistant", "b"))},
        {"output_key": None, **CHAT},
        None,
        "<bos><user>a<eos>\n<assistant>b<eos>",
        "<user>a<eos>\n<assistant>b<eos>",
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_response_and_its_end_are_targets(tokenizer, make_tokenizer, name):
    row, options, template, text, expected = EXAMPLES[name]
    tokenizer = tokenizer if template is None else make_tokenizer(chat_template=template)
    (example,), dropped = examples_of([row], tokenizer, **options)
    assert (tokenizer.decode(example.token_ids), targets(example, tokenizer), dropped) == (text, expected, 0)


def test_a_tokenizer_without_eos_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match="the tokenizer of --pretrain has no EOS token"):
        examples_of([AB], make_tokenizer(has_eos=False))


@pytest.mark.parametrize(
    ("row", "key", "max_len", "expected"),
    [
        ({"text": "abc"}, "text", 3, "<bos>ab"),
        ({"text": "abc"}, "text", 4, "<bos>abc"),
        ({"text": "abc"}, "text", 5, "<bos>abc<eos>"),
        ({"content": "ab"}, None, 9, "<bos>ab<eos>"),
        ({"text": "x", "body": "ab"}, "body", 9, "<bos>ab<eos>"),
    ],
)
@pytest.mark.parametrize("eos", [False, True])
def test_a_document_has_bos_and_eos_is_cut_and_trained_on_whole(make_tokenizer, row, key, max_len, expected, eos):
    tokenizer = make_tokenizer(bos=True, eos=eos)
    (document,) = documents_of([row], tokenizer, key, max_len)
    assert tokenizer.decode(document.token_ids) == expected
    assert document.loss_mask == [t > 0 for t in range(len(document.token_ids))]


def test_documents_that_are_cut_or_empty_are_counted(tokenizer, caplog):
    caplog.set_level(logging.INFO)
    rows = [{"text": text} for text in ("ab", "abcdefgh", "", "abcdefg", " \n")]
    assert len(documents_of(rows, tokenizer, max_len=4)) == 3
    assert caplog.messages[-2:] == [
        "--pretrain_data: 2 of 5 documents are empty and left out.",
        "--pretrain_data: 2 of 3 documents are cut at 4 tokens.",
    ]
    with pytest.raises(ValueError, match="--pretrain_data: every text is empty.*--pretrain_key"):
        documents_of(rows[2:3], tokenizer)
