"""Turns that call tools, answers of tools, and turns without a text."""

import json

import pytest
from transformers import AutoTokenizer

from openppo.config import PPODataConfig, PreferenceConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import load_preferences, load_prompts, load_sft_examples, number_rows, render_prompt

CHAT = SupervisedConfig("m", "d", apply_chat_template=True, max_len=10_000)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = [
    {"role": "user", "content": "One plus two?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"},
]
TURNS = [*ASKED, {"role": "assistant", "content": "Three."}]
TARGETS = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>Three.<|im_end|>',
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]</s> Three.</s>',
}
WITH_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def sft(messages, tokenizer):
    (example,), _ = load_sft_examples(number_rows([{"messages": messages}], "file"), tokenizer, CHAT, SFTDataConfig())
    return example


def targets(example, tokenizer):
    return tokenizer.decode([t for t, chosen in zip(example.token_ids, example.loss_mask, strict=True) if chosen])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_calls_of_tools_are_targets_and_their_answers_are_not(assets, name, content):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    arguments = CALL["function"]["arguments"]
    if name == "mistral-v3":  # its template writes &#34; for quotes of a call whose arguments are no text
        arguments = json.dumps(arguments)
    call = {
        **TURNS[1],
        "content": content,
        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}],
    }
    if content == "absent":
        del call["content"]
    example = sft([TURNS[0], call, *TURNS[2:]], tokenizer)
    assert targets(example, tokenizer) == TARGETS[name]
    whole = tokenizer.apply_chat_template([TURNS[0], call, *TURNS[2:]], tokenize=False).rstrip("\n")
    assert tokenizer.decode(example.token_ids) == whole


@pytest.mark.parametrize("opening", ["<assistant>", "<assistant><system>"])
def test_a_last_turn_that_calls_a_tool_is_a_target(make_tokenizer, opening):
    template = WITH_TOOLS.replace("%}<assistant>{%", "%}" + opening + "{%")
    example = sft(ASKED[:2], make_tokenizer(chat_template=template))
    assert targets(example, make_tokenizer()) == '[add{"a": 1, "b": 2}]<eos>'


def test_a_prompt_may_end_with_the_answer_of_a_tool(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=WITH_TOOLS)
    rows = number_rows([{"messages": ASKED}])
    (prompt,) = load_prompts(rows, tokenizer, PPODataConfig("d", apply_chat_template=True)).prompts
    expected = '<user>One plus two?<eos><assistant>[add{"a": 1, "b": 2}]<eos><tool>3<eos><assistant>'
    assert prompt.text == expected
    assert prompt.messages == ASKED


def test_pairs_may_differ_in_the_tool_that_they_call_alone(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=WITH_TOOLS)
    other = {**ASKED[1], "tool_calls": [{"function": {"name": "sub", "arguments": {}}}]}
    row = {"chosen": ASKED[:2], "rejected": [ASKED[0], other]}
    (pair,), _ = load_preferences(number_rows([row]), tokenizer, CHAT, PreferenceConfig())
    assert tokenizer.decode(pair.chosen_ids).endswith('[add{"a": 1, "b": 2}]<eos>')
    assert tokenizer.decode(pair.rejected_ids).endswith("[sub{}]<eos>")


@pytest.mark.parametrize("content", ["", None])
def test_an_answer_without_text_teaches_to_end(make_tokenizer, content):
    tokenizer = make_tokenizer(chat_template=WITHOUT_TOOLS)
    example = sft([TURNS[0], {"role": "assistant", "content": content}], tokenizer)
    assert tokenizer.decode(example.token_ids) == "<user>One plus two?<eos><assistant><eos>"
    assert targets(example, tokenizer) == "<eos>"


def test_a_template_that_leaves_tools_out_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match=r"^--dataset, row 1 of file: .*leaves out part of turn 2, 'add'"):
        sft(TURNS, make_tokenizer(chat_template=WITHOUT_TOOLS))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "content": "a", "tool_calls": "add"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"arguments": {}}}]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": 3}}]},
        {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]},
        {"role": "assistant", "content": 3},
    ],
    ids=json.dumps,
)
def test_other_turns_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=r"^--dataset, row 1 of file: not a chat message with"):
        sft([TURNS[0], message], tokenizer)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.no.more }}", "has no attribute 'no'"),
    ],
)
def test_whatever_a_template_raises_is_one_line(make_tokenizer, template, error):
    chat = [TURNS[0], TURNS[0]]
    with pytest.raises(ValueError, match=f"^the chat template refuses messages with the roles user, user: .*{error}"):
        render_prompt(chat, make_tokenizer(chat_template=template), input_template=None, apply_chat_template=True)


@pytest.mark.parametrize("content", ["Three.", ["Three."], [{"type": "text", "text": "Thr"}, {"text": "ee."}]], ids=str)
def test_content_may_be_a_text_or_a_list_of_parts(make_tokenizer, content):
    turns = [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}, {"role": "assistant", "content": content}]
    tokenizer = make_tokenizer(chat_template=WITH_TOOLS)
    written = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "Three."}]
    assert sft(turns, tokenizer) == sft(written, tokenizer)
    options = {"input_template": None, "apply_chat_template": True}
    assert render_prompt(turns[:1], tokenizer, **options) == render_prompt(written[:1], tokenizer, **options)
