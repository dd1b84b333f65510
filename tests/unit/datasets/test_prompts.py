"""Rendering of prompts, and prompts of a data set. BOS is id 2, EOS id 3, <user> 4, <assistant> 5."""

import pytest

from openppo import datasets
from openppo.config import PPODataConfig, PromptsConfig
from openppo.datasets import number_rows, render_prompt
from openppo.datasets.templates import encode_start

BOS, EOS, USER, ASSISTANT = 2, 3, 4, 5


def ids_of(tokenizer, text):
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def render(value, tokenizer, template=None, chat=False):
    return render_prompt(value, tokenizer, input_template=template, apply_chat_template=chat)


def config(**options):
    return PPODataConfig(prompt_data="data.jsonl", **options)


def load_prompts(rows, tokenizer, options, **more):
    return datasets.load_prompts(number_rows(rows), tokenizer, options, **more)


def test_plain_prompt_is_its_text_with_the_bos_of_the_tokenizer(tokenizer, make_tokenizer):
    assert render("hi", tokenizer) == ("hi", [BOS, *ids_of(tokenizer, "hi")])
    assert render("hi", make_tokenizer()) == ("hi", ids_of(tokenizer, "hi"))


def test_input_template_goes_around_the_prompt_even_if_it_has_braces(tokenizer):
    assert render("a{}b{x}", tokenizer, template="Q: {}\nA:")[0] == "Q: a{}b{x}\nA:"


def test_eos_that_the_tokenizer_appends_is_removed_from_a_prompt(make_tokenizer):
    tokenizer = make_tokenizer(bos=True, eos=True)
    assert tokenizer("hi")["input_ids"][-1] == EOS
    assert render("hi", tokenizer)[1] == [BOS, *ids_of(tokenizer, "hi")]


def test_eos_that_the_text_itself_ends_with_stays(make_tokenizer):
    expected = [*ids_of(make_tokenizer(), "hi"), EOS]
    assert render("hi<eos>", make_tokenizer())[1] == expected
    assert render("hi<eos>", make_tokenizer(eos=True))[1] == expected
    assert render("hi<eos>", make_tokenizer(bos=True, eos=True))[1] == [BOS, *expected]


def test_chat_prompt_has_one_bos_and_ends_where_the_assistant_begins(tokenizer):
    text, ids = render("hi", tokenizer, chat=True)
    assert text == "<bos><user>hi<eos>\n<assistant>"
    assert ids == [BOS, USER, *ids_of(tokenizer, "hi"), EOS, *ids_of(tokenizer, "\n"), ASSISTANT]


def test_a_text_and_its_user_message_are_the_same_chat_prompt(tokenizer):
    assert render("hi", tokenizer, chat=True) == render([{"role": "user", "content": "hi"}], tokenizer, chat=True)


def test_input_template_applies_to_a_text_before_the_chat_template(tokenizer):
    assert render("hi", tokenizer, template="Q: {}", chat=True)[0] == "<bos><user>Q: hi<eos>\n<assistant>"


@pytest.mark.parametrize(
    ("value", "chat", "template", "message"),
    [
        ([{"role": "user", "content": "a"}], False, None, "messages needs --apply_chat_template"),
        ([{"role": "user", "content": "a"}], True, "Q: {}", "--input_template goes around a text"),
        (3, False, None, "not a text but int: 3"),
        (None, True, None, "neither a text nor a list of chat messages but NoneType"),
        ("", False, "Q: {}", "the text is empty"),
        ("", True, None, "the text is empty"),
        ([], True, None, "list of chat messages is empty"),
        (
            [{"from": "human", "value": "a" * 200}],
            True,
            None,
            r'not a chat message with texts "role" and "content".*\.',
        ),
        ([{"role": "user", "content": None}], True, None, "not a chat message"),
        (["a"], True, None, "not a chat message"),
    ],
)
def test_a_value_that_is_no_prompt_is_an_error(tokenizer, value, chat, template, message):
    with pytest.raises(ValueError, match=message):
        render(value, tokenizer, template, chat)


def test_a_tokenizer_without_chat_template_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match="--apply_chat_template: the tokenizer of --pretrain has no chat template"):
        render("hi", make_tokenizer(chat_template=None), chat=True)


def test_messages_that_the_chat_template_refuses_are_an_error(make_tokenizer):
    tokenizer = make_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses messages with the roles user: roles must alternate"):
        render("hi", tokenizer, chat=True)


def test_prompts_keep_order_row_label_and_place(tokenizer):
    rows = [{"q": "one", "a": 1}, {"q": "two", "a": None}]
    loaded = datasets.load_prompts(number_rows(rows, "file"), tokenizer, config(input_key="q", label_key="a"))
    assert [(p.text, p.label, p.row) for p in loaded.prompts] == [("one", 1, rows[0]), ("two", None, rows[1])]
    assert [(p.source, p.index) for p in loaded.prompts] == [("file", 0), ("file", 1)]
    assert loaded.prompts[0].token_ids == [BOS, *ids_of(tokenizer, "one")]
    assert loaded.dropped == 0


def test_a_chat_prompt_keeps_the_messages_that_it_was_rendered_from(tokenizer):
    (prompt,) = load_prompts(
        [{"input": "hi"}], tokenizer, config(input_template="Q: {}", apply_chat_template=True)
    ).prompts
    assert prompt.messages == [{"role": "user", "content": "Q: hi"}]
    assert prompt.text == "<bos><user>Q: hi<eos>\n<assistant>"
    (plain,) = load_prompts([{"input": "hi"}], tokenizer, config()).prompts
    assert plain.messages is None


def test_a_recognized_shape_gives_the_label_unless_a_column_is_named(tokenizer):
    rows = [{"question": "q", "answer": "a", "level": 3}]
    (recognized,) = load_prompts(rows, tokenizer, config()).prompts
    (named,) = load_prompts(rows, tokenizer, config(label_key="level")).prompts
    (without,) = load_prompts(rows, tokenizer, config(input_key="question")).prompts
    assert (recognized.label, named.label, without.label) == ("a", 3, None)


def test_the_same_loader_serves_the_commands_that_only_answer(tokenizer):
    options = PromptsConfig("model", "data.jsonl", prompt_max_len=2)
    with pytest.raises(ValueError, match="--eval_data: all 1 rows are longer than --prompt_max_len 2"):
        load_prompts([{"input": "abc"}], tokenizer, options, flag="--eval_data")


def test_prompt_longer_than_the_limit_is_dropped_and_counted(tokenizer):
    rows = [{"input": "abc"}, {"input": "abcd"}, {"input": "ab"}]  # 4, 5 and 3 tokens with BOS
    loaded = load_prompts(rows, tokenizer, config(prompt_max_len=4))
    assert [prompt.text for prompt in loaded.prompts] == ["abc", "ab"]
    assert loaded.dropped == 1


def test_prompts_that_are_all_too_long_are_an_error(tokenizer):
    rows = [{"input": "abcd"}, {"input": "abc"}]
    with pytest.raises(ValueError, match=r"all 2 rows are longer than --prompt_max_len 3; the shortest has 4"):
        load_prompts(rows, tokenizer, config(prompt_max_len=3))


@pytest.mark.parametrize(("value", "message"), [("", "the text is empty"), (1.5, "not a text but float")])
def test_a_bad_prompt_is_an_error_that_names_flag_and_row(tokenizer, value, message):
    with pytest.raises(ValueError, match=f"--prompt_data, row 2: {message}"):
        load_prompts([{"input": "a"}, {"input": value}], tokenizer, config())


def test_a_prompt_without_tokens_is_an_error(make_tokenizer):
    tokenizer = make_tokenizer(chat_template="{{ '' }}")
    with pytest.raises(ValueError, match=r"--prompt_data, row 1: the prompt .*'a'.* has no tokens"):
        load_prompts([{"input": "a"}], tokenizer, config(apply_chat_template=True))


@pytest.mark.parametrize(
    ("options", "flag"), [({"input_key": "prompt"}, "--input_key"), ({"label_key": "answer"}, "--label_key")]
)
def test_a_missing_column_names_its_flag(tokenizer, options, flag):
    with pytest.raises(ValueError, match=f"--prompt_data, row 1: no column .*Its columns are input, id: .*{flag}"):
        load_prompts([{"input": "a", "id": 1}], tokenizer, config(**options))


def test_a_missing_chat_template_is_reported_before_any_row(make_tokenizer):
    with pytest.raises(ValueError, match=r"^--apply_chat_template: "):
        load_prompts([{"input": "a"}], make_tokenizer(chat_template=None), config(apply_chat_template=True))


def test_a_beginning_that_the_text_has_already_is_not_doubled(make_tokenizer):
    """Prompts that were rendered before, for Llama 3 or Mistral say."""
    tokenizer = make_tokenizer(bos=True)
    assert encode_start(tokenizer, "<bos>ab") == encode_start(tokenizer, "ab")
    assert encode_start(tokenizer, "a<bos>b").count(tokenizer.bos_token_id) == 2
    both = make_tokenizer(bos=True, eos=True)
    assert encode_start(both, "<bos>ab") == encode_start(tokenizer, "ab")
    assert encode_start(both, "<bos>ab<eos>")[-1] == both.eos_token_id
