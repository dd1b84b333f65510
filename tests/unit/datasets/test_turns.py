"""Which tokens of a chat are targets, for templates of many kinds, with and without calls of tools. EOS is id 3."""

import json
import re

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openppo.config import RowsConfig
from openppo.datasets import render_prompt, render_response, render_whole
from tests.unit.datasets.loaders import (
    ENDS_IN_EOS,
    OPEN_WHEN_ASKED,
    OTHER_WHEN_ASKED,
    WITH_CHAT,
    WITHOUT_END,
    load,
    shown,
    targets,
    turns,
)

CHAT = [*turns(system="s", user="a", assistant="b"), *turns(user="c", assistant="d")]
SYSTEM_IN_LAST = (
    "{% set s = messages[0].content %}"
    "{% for m in messages %}{% if m.role == 'user' %}<user>{% if loop.index >= loop.length - 1 %}{{ s }}|{% endif %}"
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
S_TO_D = "<system>s<eos>{0}<user>a<eos>{0}<assistant>«b<eos>»{0}<user>c<eos>{0}<assistant>«d<eos>»"
WITH_PADS = S_TO_D.format("\n").replace("<eos>", "<pad>").replace("d<pad>", "d<pad>\n<eos>")
LAST_THINKS = [*CHAT[:4], *turns(assistant="<think>u</think>d")]
STRIPS = ENDS_IN_EOS.replace("content", "content.strip().replace('\\n\\n', '\\n')")
NO_END = "system: s\nuser: a\nassistant: «b\n»user: c\nassistant: «d\n<eos>»"
CASES = {  # targets in «»
    "ends in EOS": (ENDS_IN_EOS, CHAT, S_TO_D.format("\n")),
    "another beginning when asked": (OTHER_WHEN_ASKED, CHAT, S_TO_D.format("")),
    "system in the last one": (SYSTEM_IN_LAST, CHAT, "<user>a!« b<eos>»<user>s|c!« d<eos>»"),
    "a token beside EOS": (ENDS_IN_A_TOKEN_BESIDE_EOS, CHAT, WITH_PADS),
    "last thinks": (
        THOUGHT_IN_LAST_TURN_ONLY,
        LAST_THINKS,
        S_TO_D.format("").replace("d<", "<think>u</think>d<"),
    ),
    "other blanks": (
        STRIPS,
        turns(user="a", assistant=" d\n\nc "),
        "<user>a<eos>\n<assistant>«d\nc<eos>»",
    ),
    "no end of turn": (WITHOUT_END, CHAT, NO_END),
}


def rendered(chat, tokenizer):
    return render_whole(chat, tokenizer, RowsConfig(**WITH_CHAT))


def prompt_of(chat, tokenizer):
    return render_prompt(chat, tokenizer, RowsConfig(**WITH_CHAT))


@pytest.mark.parametrize(("template", "chat", "expected"), CASES.values(), ids=CASES.keys())
def test_targets_are_the_assistants_turns_with_what_ends_them(
    make_tokenizer, template, chat, expected
):
    tokenizer = make_tokenizer(bos=True, chat_template=template)
    assert shown(rendered(chat, tokenizer), tokenizer) == expected
    last = render_response(chat[:-1], chat[-1]["content"], tokenizer, RowsConfig(**WITH_CHAT))
    before, of_last = expected.rsplit("«", 1)
    assert shown(last, tokenizer) == re.sub("[«»]", "", before) + "«" + of_last


def test_targets_begin_where_generation_does(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=ENDS_IN_EOS)
    example = rendered(CHAT, tokenizer)
    for n_before, place in ((2, example.loss_mask.index(True)), (4, len(example.token_ids) - 2)):
        assert example.token_ids[:place] == prompt_of(CHAT[:n_before], tokenizer).token_ids
    assert (
        shown(rendered(CHAT[1:4], tokenizer), tokenizer) == "<user>a<eos>\n<assistant>«b<eos>»"
    ), "nothing after it"
    chat = [CHAT[2], *CHAT[1:3]]  # the assistant may begin, whose first token is not a target
    assert targets(rendered(chat, tokenizer), tokenizer) == "b<eos>b<eos>"
    tokenizer = make_tokenizer(
        chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    )
    assert targets(rendered(chat, tokenizer), tokenizer) == "<eos>b<eos>"


LENGTHS = "{% for m in messages %}{{ m.content|length }}:{{ m.content }};{% endfor %}"
LAST_ONLY = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
SAYS_YES, CALLS_ADD = turns(assistant="Yes.")[0], {"role": "assistant", "content": ""}
DROPPED = (
    {**SAYS_YES, "reasoning_content": "two plus two"},  # which the user says too
    {**CALLS_ADD, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
)


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (LENGTHS, CHAT, "around turn 3 depends on its.*Leave --apply_chat_template out"),
        (LAST_ONLY, CHAT, "leaves out turn 1, of the role 'system': 's'.*--chat_template"),
        (ENDS_IN_EOS, CHAT[:2], "no turn of the assistant to train on"),
        *(
            (ENDS_IN_EOS, [*turns(user="Is it two plus two?"), turn], "leaves out .*turn 2")
            for turn in DROPPED
        ),
    ],
)
def test_a_turn_that_a_template_drops_or_that_cannot_be_found_is_an_error(
    make_tokenizer, template, chat, message
):
    with pytest.raises(ValueError, match=message):
        rendered(chat, make_tokenizer(chat_template=template))


DEEPSEEK_R1_DISTILL = (
    "<bos>{% for m in messages %}{% set content = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<assistant>{{ content }}<eos>{% else %}<user>{{ content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
"""As its authors wrote it, with the special tokens of these tests."""
QUESTION, THOUGHT, PLAIN = (
    turns(user="a"),
    turns(assistant="<think>\nt\n</think>\n\nb"),
    turns(assistant="b"),
)
THINKS = THOUGHT[0]["content"]


@pytest.mark.parametrize(
    ("task", "data", "row"),
    [
        ("sft", {}, {"messages": QUESTION + THOUGHT + QUESTION + PLAIN}),
        ("sft", {"input_key": "messages", "output_key": None}, {"messages": QUESTION + THOUGHT}),
        ("pairs", {}, {"prompt": "a", "chosen": THINKS, "rejected": "b"}),
    ],
)
def test_a_template_that_drops_the_reasoning_is_an_error_with_file_and_row(
    make_tokenizer, task, data, row
):
    for template in (DEEPSEEK_R1_DISTILL, DEEPSEEK_R1_DISTILL.replace("<think>\\n", "")):
        with pytest.raises(
            ValueError,
            match=r"^--dataset, row 1 of file: .*the chat template leaves out part of turn",
        ):
            load(task, [row], make_tokenizer(chat_template=template), data, **WITH_CHAT)
    whole = make_tokenizer(chat_template=DEEPSEEK_R1_DISTILL.replace(".split('</think>')[-1]", ""))
    assert len(load(task, [row], whole, data, **WITH_CHAT)) == 1


def test_a_token_never_spans_the_border_between_prompt_and_response():
    vocab = {
        token: number for number, token in enumerate(["<eos>", " ", "a", "q", ":", " a", "a a"])
    }
    core = Tokenizer(BPE(vocab, [(" ", "a"), ("a", " a")]))
    core.add_special_tokens(["<eos>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("q: a a")["input_ids"]) == [
        "q",
        ":",
        " a",
        " a",
    ]
    for prompt, response, tokens, n_asked in (
        ("q: ", "a a", [" ", "a a"], 3),
        ("q:", " a a", [" a", " a"], 2),
    ):
        example = render_response(prompt, response, tokenizer, RowsConfig())
        assert tokenizer.convert_ids_to_tokens(example.token_ids) == ["q", ":", *tokens, "<eos>"]
        assert example.loss_mask == [t >= n_asked for t in range(5)]


# Calls of tools, and turns without a text

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
SUM = turns(user="One plus two?")
THREE = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"}
ASKED = [*SUM, {"role": "assistant", "content": None, "tool_calls": [CALL]}, THREE]
CALLS = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>Three.<|im_end|>',
    "mistral-v3": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]</s> Three.</s>',
}
WITH_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}<eos>{% endfor %}"
    + OPEN_WHEN_ASKED
)
WITHOUT_TOOLS = ENDS_IN_EOS.replace("\n", "")


def sft(messages, tokenizer):
    return load("sft", [{"messages": messages}], tokenizer, **WITH_CHAT)[0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}], ids=str)
def test_calls_of_tools_are_targets_and_their_answers_are_not(assets, name, content):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    calling = {"role": "assistant", **content, "tool_calls": [CALL]}
    example = sft([*SUM, calling, ASKED[2], *turns(assistant="Three.")], tokenizer)
    assert targets(example, tokenizer) == CALLS[name]

    arguments = CALL["function"]["arguments"]
    if (
        name == "mistral-v3"
    ):  # its template writes &#34; for quotes of a call whose arguments are no text
        arguments = json.dumps(arguments)
    written = {**CALL, "function": {"name": "add", "arguments": arguments}}
    chat = [*SUM, calling | {"tool_calls": [written]}, ASKED[2], *turns(assistant="Three.")]
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(
        chat, tokenize=False
    ).rstrip("\n")


def test_a_call_of_a_tool_may_end_a_conversation_and_its_answer_a_prompt(make_tokenizer):
    for opening in ("<assistant>", "<assistant><system>"):
        tokenizer = make_tokenizer(
            chat_template=WITH_TOOLS.replace("%}<assistant>{%", "%}" + opening + "{%")
        )
        assert targets(sft(ASKED[:2], tokenizer), tokenizer) == '[add{"a": 1, "b": 2}]<eos>'
    tokenizer = make_tokenizer(chat_template=WITH_TOOLS)
    (prompt,) = load("prompts", [{"messages": ASKED}], tokenizer, **WITH_CHAT)
    assert (
        prompt.text
        == '<user>One plus two?<eos><assistant>[add{"a": 1, "b": 2}]<eos><tool>3<eos><assistant>'
    )
    assert prompt.messages == ASKED
    other = {
        **ASKED[1],
        "tool_calls": [{"function": {"name": "sub", "arguments": {}}}],
    }  # all that the sides differ in
    (pair,) = load(
        "pairs", [{"chosen": ASKED[:2], "rejected": [*SUM, other]}], tokenizer, **WITH_CHAT
    )
    assert tokenizer.decode(pair.chosen_ids).endswith('[add{"a": 1, "b": 2}]<eos>')
    assert tokenizer.decode(pair.rejected_ids).endswith("[sub{}]<eos>")
    with pytest.raises(
        ValueError, match=r"^--dataset, row 1 of file: .*leaves out what turn 2, .*calls: 'add'"
    ):
        sft([*ASKED, *turns(assistant="Three.")], make_tokenizer(chat_template=WITHOUT_TOOLS))


@pytest.mark.parametrize("content", ["", None])
def test_a_turn_without_text_and_call_is_refused(make_tokenizer, content):
    tokenizer = make_tokenizer(chat_template=WITHOUT_TOOLS)
    empty = {"role": "assistant", "content": content}
    for chat in ([*SUM, empty], [*SUM, empty, *SUM, *turns(assistant="b")]):
        with pytest.raises(
            ValueError, match=r"row 1 of file: turn 2, .* has neither a text nor a call. Remove"
        ):
            sft(chat, tokenizer)
    with pytest.raises(
        ValueError, match=r"row 1 of file: turn 2, .* has neither a text nor a call. Remove"
    ):
        load("prompts", [{"prompt": [*SUM, empty]}], tokenizer, **WITH_CHAT)


def test_a_response_without_text_teaches_to_end(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=WITHOUT_TOOLS)
    (example,) = load("sft", [{"prompt": SUM, "response": ""}], tokenizer, **WITH_CHAT)
    assert shown(example, tokenizer) == "<user>One plus two?<eos><assistant>«<eos>»"
    empty = [{"role": "assistant", "content": ""}]
    (pair,) = load(
        "pairs", [{"prompt": SUM, "chosen": "a", "rejected": empty}], tokenizer, **WITH_CHAT
    )
    assert tokenizer.decode(pair.rejected_ids) == "<user>One plus two?<eos><assistant><eos>"


def test_whatever_a_template_raises_is_one_line(make_tokenizer):
    raises = {
        "{% for i in range(10 ** 9) %}a{% endfor %}": "Range too big",
        "{{ messages[0].no.more }}": "has no at",
    }
    raises |= {"{{ 1 / 0 }}": "division by zero", "{{ raise_exception('alternate') }}": "alternate"}
    for template, error in raises.items():
        with pytest.raises(
            ValueError, match=f"^the chat template refuses .* the roles user, user: .*{error}"
        ):
            prompt_of(SUM * 2, make_tokenizer(chat_template=template))


@pytest.mark.parametrize(
    "content", ["Three.", ["Three."], [{"type": "text", "text": "Thr"}, {"text": "ee."}]], ids=str
)
def test_content_may_be_a_text_or_a_list_of_parts(make_tokenizer, content):
    tokenizer = make_tokenizer(chat_template=WITH_TOOLS)
    chat, written = (
        turns(user=[{"text": "1+2?"}], assistant=content),
        turns(user="1+2?", assistant="Three."),
    )
    assert sft(chat, tokenizer) == sft(written, tokenizer)
    assert prompt_of(chat[:1], tokenizer) == prompt_of(written[:1], tokenizer)
