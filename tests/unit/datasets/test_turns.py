"""Which tokens of a chat are targets, for templates of many kinds, with and without calls of tools. EOS is id 3."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openppo.config import PPODataConfig, PreferenceConfig, SFTDataConfig, SupervisedConfig
from openppo.datasets import (
    load_preferences,
    load_prompts,
    load_sft_examples,
    number_rows,
    render_conversation,
    render_prompt,
    render_response,
)

TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>t</think>b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "<think>u</think>d"},
]
PLAIN_TURNS = [{**turn, "content": turn["content"].rpartition(">")[2]} for turn in TURNS]

OPEN_WHEN_ASKED = "{% if add_generation_prompt %}<assistant>{% endif %}"
ENDS_IN_EOS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}" + OPEN_WHEN_ASKED
SYSTEM_IN_LAST_QUESTION = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% if loop.index >= loop.length - 1 %}s|{% endif %}"
    "{{ m.content }}!{% elif m.role == 'assistant' %} {{ m.content }}<eos>{% endif %}{% endfor %}"
)
ENDS_IN_A_TOKEN_BESIDE_EOS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<pad>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"
)
THOUGHT_IN_LAST_TURN_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "<think></think>{% endif %}{{ m.content if loop.last else m.content.split('</think>')[-1] }}<eos>{% endfor %}"
    + OPEN_WHEN_ASKED
)
OTHER_WHEN_ASKED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>?{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
S_TO_D = "<system>s<eos>{0}<user>a<eos>{0}<assistant>b<eos>{0}<user>c<eos>{0}<assistant>d<eos>"
CASES = {
    "ends in EOS": (ENDS_IN_EOS, PLAIN_TURNS, S_TO_D.format("\n"), "b<eos>d<eos>"),
    "another beginning when asked": (OTHER_WHEN_ASKED, PLAIN_TURNS, S_TO_D.format(""), "b<eos>d<eos>"),
    "system text in the last question": (
        *(SYSTEM_IN_LAST_QUESTION, PLAIN_TURNS, "<user>a! b<eos><user>s|c! d<eos>", " b<eos> d<eos>"),
    ),
    "ends in a token beside EOS": (
        *(ENDS_IN_A_TOKEN_BESIDE_EOS, PLAIN_TURNS),
        *(S_TO_D.format("\n").replace("<eos>", "<pad>") + "\n<eos>", "b<pad>d<pad>\n<eos>"),
    ),
    "thoughts in the last turn only": (
        *(THOUGHT_IN_LAST_TURN_ONLY, [*PLAIN_TURNS[:4], TURNS[4]]),
        *(S_TO_D.format("").replace("d<", "<think>u</think>d<"), "b<eos><think>u</think>d<eos>"),
    ),
    "no end of turn": (
        *(WITHOUT_END, PLAIN_TURNS, "system: s\nuser: a\nassistant: b\nuser: c\nassistant: d\n<eos>"),
        "b\nd\n<eos>",
    ),
}


def targets(example, tokenizer):
    return tokenizer.decode([t for t, chosen in zip(example.token_ids, example.loss_mask, strict=True) if chosen])


@pytest.mark.parametrize(("template", "turns", "whole", "expected"), CASES.values(), ids=CASES.keys())
def test_targets_are_the_assistants_turns_with_what_ends_them(make_tokenizer, template, turns, whole, expected):
    tokenizer = make_tokenizer(bos=True, chat_template=template)
    chat = render_conversation(turns, tokenizer, input_template=None)
    last = render_response(turns[:-1], turns[-1]["content"], tokenizer, input_template=None, apply_chat_template=True)
    assert tokenizer.decode(chat.token_ids) == tokenizer.decode(last.token_ids) == whole
    assert targets(chat, tokenizer) == expected
    assert expected.endswith(targets(last, tokenizer))
    assert targets(last, tokenizer).strip()[0] in "d<"


def test_targets_begin_where_generation_does(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=ENDS_IN_EOS)
    example = render_conversation(PLAIN_TURNS, tokenizer, input_template=None)
    for n_before, place in ((2, example.loss_mask.index(True)), (4, len(example.token_ids) - 2)):
        _, asked = render_prompt(PLAIN_TURNS[:n_before], tokenizer, input_template=None, apply_chat_template=True)
        assert example.token_ids[:place] == asked
    example = render_conversation(PLAIN_TURNS[1:4], tokenizer, input_template=None)  # nothing after the last answer
    assert tokenizer.decode(example.token_ids) == "<user>a<eos>\n<assistant>b<eos>"


def test_a_chat_may_begin_with_the_assistant_whose_first_token_is_not_a_target(make_tokenizer):
    chat = [PLAIN_TURNS[2], *PLAIN_TURNS[1:3]]
    tokenizer = make_tokenizer(chat_template=ENDS_IN_EOS)
    assert targets(render_conversation(chat, tokenizer, input_template=None), tokenizer) == "b<eos>b<eos>"
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    assert targets(render_conversation(chat, tokenizer, input_template=None), tokenizer) == "<eos>b<eos>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content|length }}:{{ m.content }};{% endfor %}", "around turn 3 depends on its"),
        (
            "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}",
            "leaves out part of turn 3",
        ),
    ],
)
def test_a_template_in_which_a_turn_cannot_be_found_is_an_error(make_tokenizer, template, message):
    with pytest.raises(ValueError, match=f"{message}.*[Ll]eave --apply_chat_template out"):
        render_conversation(PLAIN_TURNS, make_tokenizer(chat_template=template), input_template=None)


DEEPSEEK_R1_DISTILL = (
    "<bos>{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<assistant>{{ content }}<eos>{% else %}<user>{{ content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
"""As its authors wrote it, with the special tokens of these tests."""
QUESTION, THOUGHT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"}
PLAIN = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("load", "data", "row"),
    [
        (load_sft_examples, SFTDataConfig(), {"messages": [QUESTION, THOUGHT]}),
        (load_sft_examples, SFTDataConfig(), {"messages": [QUESTION, THOUGHT, QUESTION, PLAIN]}),
        (load_sft_examples, SFTDataConfig(), {"prompt": "a", "response": THOUGHT["content"]}),
        (load_sft_examples, SFTDataConfig("messages", None), {"messages": [QUESTION, THOUGHT]}),
        (load_preferences, PreferenceConfig(), {"prompt": "a", "chosen": THOUGHT["content"], "rejected": "b"}),
        (load_preferences, PreferenceConfig("prompt"), {"prompt": None, "chosen": [THOUGHT], "rejected": [PLAIN]}),
        (load_preferences, PreferenceConfig(), {"chosen": [QUESTION, PLAIN], "rejected": [QUESTION, THOUGHT]}),
    ],
)
def test_a_template_that_drops_the_reasoning_is_an_error_with_file_and_row(make_tokenizer, load, data, row):
    supervised = SupervisedConfig("m", "d", apply_chat_template=True)
    rows = number_rows([row], "file")
    for template in (DEEPSEEK_R1_DISTILL, DEEPSEEK_R1_DISTILL.replace("<think>\\n", "")):
        with pytest.raises(ValueError, match=r"^--dataset, row 1 of file: .*the chat template leaves out part of turn"):
            load(rows, make_tokenizer(chat_template=template), supervised, data)
    whole = DEEPSEEK_R1_DISTILL.replace(".split('</think>')[-1]", "")
    assert load(rows, make_tokenizer(chat_template=whole), supervised, data)[1] == 0


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "Yes.", "reasoning_content": "two plus two"},  # which the user says too
        {"content": "Yes.", "thinking": "a sum"},
        {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"numbers": ["two", "3"]}}}]},
        {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"unit": "inch"}'}}]},
    ],
)
def test_reasoning_and_arguments_that_a_template_drops_are_an_error(make_tokenizer, turn):
    names_only = ENDS_IN_EOS.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    )
    assert names_only != ENDS_IN_EOS
    chat = [{"role": "user", "content": "Is it two plus two?"}, {"role": "assistant", **turn}]
    with pytest.raises(ValueError, match="the chat template leaves out part of turn 2"):
        render_conversation(chat, make_tokenizer(chat_template=names_only), input_template=None)


def test_a_template_may_change_the_blanks_of_a_turn(make_tokenizer):
    strips = ENDS_IN_EOS.replace("m.content", "m.content.strip().replace('\\n\\n', '\\n')")
    chat = [QUESTION, {"role": "assistant", "content": " b\n\nc "}]
    example = render_conversation(chat, make_tokenizer(chat_template=strips), input_template=None)
    assert targets(example, make_tokenizer()) == "b\nc<eos>"


def test_a_chat_without_an_answer_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match="no turn of the assistant to train on"):
        render_conversation(PLAIN_TURNS[:2], make_tokenizer(), input_template=None)


def test_a_token_never_spans_the_border_between_prompt_and_response():
    vocab = {token: number for number, token in enumerate(["<eos>", " ", "a", "q", ":", " a", "a a"])}
    core = Tokenizer(BPE(vocab, [(" ", "a"), ("a", " a")]))
    core.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("q: a a")["input_ids"]) == ["q", ":", " a", " a"]
    example = render_response("q: ", "a a", tokenizer, input_template=None, apply_chat_template=False)
    assert tokenizer.convert_ids_to_tokens(example.token_ids) == ["q", ":", " ", "a a", "<eos>"]
    assert example.loss_mask == [False, False, False, True, True]
    example = render_response("q:", " a a", tokenizer, input_template=None, apply_chat_template=False)
    assert tokenizer.convert_ids_to_tokens(example.token_ids) == ["q", ":", " a", " a", "<eos>"]


# Calls of tools, and turns without a text

SUPERVISED = SupervisedConfig("m", "d", apply_chat_template=True, max_len=10_000)
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = [
    {"role": "user", "content": "One plus two?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"},
]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Three."}]
CALLS = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>Three.<|im_end|>',
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]</s> Three.</s>',
}
WITH_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = ENDS_IN_EOS.replace("\n", "")


def sft(messages, tokenizer):
    rows = number_rows([{"messages": messages}], "file")
    return load_sft_examples(rows, tokenizer, SUPERVISED, SFTDataConfig())[0][0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_calls_of_tools_are_targets_and_their_answers_are_not(assets, name, content):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    arguments = CALL["function"]["arguments"]
    if name == "mistral-v3":  # its template writes &#34; for quotes of a call whose arguments are no text
        arguments = json.dumps(arguments)
    call = {
        **ANSWERED[1],
        "content": content,
        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}],
    }
    if content == "absent":
        del call["content"]
    example = sft([ANSWERED[0], call, *ANSWERED[2:]], tokenizer)
    assert targets(example, tokenizer) == CALLS[name]
    whole = tokenizer.apply_chat_template([ANSWERED[0], call, *ANSWERED[2:]], tokenize=False).rstrip("\n")
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
    (pair,), _ = load_preferences(number_rows([row]), tokenizer, SUPERVISED, PreferenceConfig())
    assert tokenizer.decode(pair.chosen_ids).endswith('[add{"a": 1, "b": 2}]<eos>')
    assert tokenizer.decode(pair.rejected_ids).endswith("[sub{}]<eos>")


@pytest.mark.parametrize("content", ["", None])
def test_an_answer_without_text_teaches_to_end(make_tokenizer, content):
    tokenizer = make_tokenizer(chat_template=WITHOUT_TOOLS)
    example = sft([ANSWERED[0], {"role": "assistant", "content": content}], tokenizer)
    assert tokenizer.decode(example.token_ids) == "<user>One plus two?<eos><assistant><eos>"
    assert targets(example, tokenizer) == "<eos>"


def test_a_template_that_leaves_tools_out_is_an_error(make_tokenizer):
    with pytest.raises(ValueError, match=r"^--dataset, row 1 of file: .*leaves out part of turn 2, 'add'"):
        sft(ANSWERED, make_tokenizer(chat_template=WITHOUT_TOOLS))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "a", "tool_calls": "add"},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": 3}}]},
        {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]},
    ],
    ids=json.dumps,
)
def test_other_turns_are_refused(tokenizer, message):
    with pytest.raises(ValueError, match=r"^--dataset, row 1 of file: not a chat message with"):
        sft([ANSWERED[0], message], tokenizer)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.no.more }}", "has no attribute 'no'"),
    ],
)
def test_whatever_a_template_raises_is_one_line(make_tokenizer, template, error):
    chat = [ANSWERED[0], ANSWERED[0]]
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
