"""What is read of rows by chat templates of six families: each message, each call, and a turn to be continued."""

import json
import logging

import pytest

from openppo.config import RowsConfig
from openppo.datasets import render_prompt
from tests.unit.datasets.loaders import WITH_CHAT, load, shown, turns

_OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
TEMPLATES = {  # each in its way with roles, blanks and thoughts, with the special tokens of these tests
    "qwen": (  # skips roles that it does not know
        "{% for m in messages %}"
        "{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
        + _CALLS
        + "<eos>\n"
        "{% elif m.role == 'tool' %}<user>({{ m.content }})<eos>\n{% endif %}{% endfor %}" + _OPEN
    ),
    "deepseek": (  # the last system message wins, thoughts are cut off
        "{% set n = namespace(s='') %}"
        "{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}{% endfor %}"
        "<bos>{{ n.s }}{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    ),
    "mistral": (  # the system text goes into the last question, roles must alternate
        "<bos>{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% set chat = messages[1:] if s else messages %}{% for m in chat %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}<user>{% if s and loop.index >= loop.length - 1 %}{{ s }}\n{% endif %}{{ m.content }}"
        "{% else %} {{ m.content | trim }}<eos>{% endif %}{% endfor %}"
    ),
    "phi": (  # skips roles that it does not know, tools among them
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "<{{ m.role }}>\n{{ m.content }}<pad>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% else %}<eos>{% endif %}"
    ),
    "llama": (  # writes any role, without blanks around its text
        "<bos>{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    ),
    "qwen3": (  # writes a thought before the last answer
        "{% for m in messages %}{% if m.role in ('system', 'user') %}<{{ m.role }}>{{ m.content }}<eos>\n"
        "{% elif m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}<assistant>"
        "{% if loop.last %}<think>\n{{ parts[0].replace('<think>', '').strip() if parts | length > 1 }}\n</think>\n\n"
        "{% endif %}{{ parts[-1].lstrip('\n') }}<eos>\n{% endif %}{% endfor %}" + _OPEN
    ),
}
ASK = turns(user="1+2?")
ANSWER = turns(assistant="Three.")


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def tokenizer(make_tokenizer, family):
    return make_tokenizer(chat_template=TEMPLATES[family])


def sft(messages, tokenizer):
    (example,) = load("sft", [{"messages": messages}], tokenizer, **WITH_CHAT)
    return shown(example, tokenizer)


def prompt(messages, tokenizer):
    return render_prompt(messages, tokenizer, RowsConfig(**WITH_CHAT)).text


# Every message is read

SKIPPED = {"User", "human", "observation"}
WITH_ROLE = {  # "User" takes the place of the user
    "qwen": "leaves out turn 1",
    "deepseek": "leaves out turn 1",
    "mistral": "roles must alternate",
    "phi": "leaves out turn 1",
    "llama": "<bos>[{}]\n1+2?<eos>[assistant]\n«Three.<eos>»",
    "qwen3": "leaves out turn 1",
}


@pytest.mark.parametrize("role", sorted(SKIPPED))
def test_a_message_of_an_unknown_role_is_read_or_refused(family, tokenizer, role):
    asked = [{"role": role, "content": "1+2?"}]
    if family == "llama":
        assert sft([*asked, *ANSWER], tokenizer) == WITH_ROLE[family].format(role)
        return
    with pytest.raises(ValueError, match=rf"row 1 of file: .*{WITH_ROLE[family]}"):
        sft([*asked, *ANSWER], tokenizer)
    with pytest.raises(ValueError, match=rf"row 1 of file: .*{WITH_ROLE[family]}"):
        load("prompts", [{"messages": asked}], tokenizer, **WITH_CHAT)
    with pytest.raises(ValueError, match=rf"row 1 of file: .*{WITH_ROLE[family]}"):
        load("pairs", [{"prompt": asked, "chosen": "a", "rejected": "b"}], tokenizer, **WITH_CHAT)


WITH_SYSTEM = {
    "qwen": "<system>Be a POET.<eos>\n<user>1+2?<eos>\n<assistant>«Three.<eos>»",
    "deepseek": "<bos>Be a POET.<user>1+2?<assistant>«Three.<eos>»",
    "mistral": "<bos><user>Be a POET.\n1+2?« Three.<eos>»",
    "phi": "<system>\nBe a POET.<pad>\n<user>\n1+2?<pad>\n<assistant>\n«Three.<pad>\n<eos>»",
    "llama": "<bos>[system]\nBe a POET.<eos>[user]\n1+2?<eos>[assistant]\n«Three.<eos>»",
    "qwen3": "<system>Be a POET.<eos>\n<user>1+2?<eos>\n<assistant>«<think>\n\n</think>\n\nThree.<eos>»",
}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_developer_is_the_system(family, tokenizer, role):
    assert (
        sft([{"role": role, "content": "Be a POET."}, *ASK, *ANSWER], tokenizer)
        == WITH_SYSTEM[family]
    )


def test_a_second_system_message_is_read_or_refused(family, tokenizer):
    chat = [*turns(system="Be a POET."), *turns(system="Be brief."), *ASK, *ANSWER]
    if family in ("deepseek", "mistral"):
        with pytest.raises(
            ValueError, match=r"leaves out turn 1, of the role 'system'|roles must alternate"
        ):
            sft(chat, tokenizer)
        return
    assert "Be a POET." in sft(chat, tokenizer)
    assert "Be brief." in sft(chat, tokenizer)


def test_a_lost_message_is_not_taken_for_another(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=TEMPLATES["qwen"])
    lost = {"role": "note", "content": "Three"}
    for chat in ([*ASK, lost, *ANSWER], [lost, *turns(user="Is it Three?"), *ANSWER]):
        with pytest.raises(ValueError, match=r"leaves out turn \d, of the role 'note': 'Three'"):
            sft(chat, tokenizer)


def test_a_template_that_reads_contents_is_not_refused(make_tokenizer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ 1 // (m.content | int) }}{{ m.content }}<eos>{% endfor %}"
        + _OPEN
    )
    tokenizer = make_tokenizer(chat_template=template)
    assert (
        sft([*turns(user="12"), *turns(assistant="3")], tokenizer)
        == "<user>012<eos><assistant>«03<eos>»"
    )
    tokenizer = make_tokenizer(chat_template=template.replace("{{ m.content }}<", "<"))
    with pytest.raises(ValueError, match="leaves out turn 1, of the role 'user': '12'"):
        sft([*turns(user="12"), *turns(assistant="3")], tokenizer)


# Calls of tools, in the forms that rows have

CALL = {"name": "add", "arguments": {"a": 1}}
FORMS = {
    "an object": [
        {"tool_calls": [{"id": "c1", "type": "function", "function": CALL}], "content": ""}
    ],
    "JSON text": [
        {
            "tool_calls": [{"type": "function", "function": CALL | {"arguments": '{"a": 1}'}}],
            "content": None,
        }
    ],
    "flat": [{"tool_calls": [CALL], "content": None}],
    "function_call": [{"function_call": CALL | {"arguments": '{"a": 1}'}, "content": None}],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("role", ["tool", "function"])
def test_calls_have_one_rendering_in_every_form(make_tokenizer, form, role):
    tokenizer = make_tokenizer(chat_template=TEMPLATES["qwen"])
    (fields,) = FORMS[form]
    chat = [
        *ASK,
        {"role": "assistant", **fields},
        {"role": role, "name": "add", "content": "3"},
        *ANSWER,
    ]
    written = (
        '<user>1+2?<eos>\n<assistant>«[add{"a": 1}]<eos>»\n<user>(3)<eos>\n<assistant>«Three.<eos>»'
    )
    assert sft(chat, tokenizer) == written
    asked = '<user>1+2?<eos>\n<assistant>[add{"a": 1}]<eos>\n<user>(3)<eos>\n<assistant>'
    assert prompt(chat[:-1], tokenizer) == asked
    sides = {"chosen": "Three.", "rejected": "Four."}
    (pair,) = load("pairs", [{"prompt": chat[:-1], **sides}], tokenizer, **WITH_CHAT)
    assert tokenizer.decode(pair.chosen_ids) == asked + "Three.<eos>"


def test_a_template_that_writes_arguments_well_as_text_gets_text(make_tokenizer):
    template = TEMPLATES["qwen"].replace(
        "| tojson", "if c.function.arguments is string else c.function.arguments"
    )
    tokenizer = make_tokenizer(chat_template=template)
    (fields,) = FORMS["an object"]
    assert '«[add{"a": 1}]<eos>»' in sft([*ASK, {"role": "assistant", **fields}], tokenizer)


SHORT_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}[{{ c.function.name }} {{ c.id }}]{% endfor %}{% if m.role == 'tool' %}({{ m.tool_call_id }} "
    "{{ m.content }}){% else %}<{{ m.role }}>{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def test_ids_of_calls_are_short_where_the_template_demands_it(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=SHORT_IDS)
    for ids, results in (
        (("call_1", "call_2"), ("call_2", "call_1")),
        ((None, None), (None, None)),
    ):
        calls = [{"function": CALL} | ({"id": call_id} if call_id else {}) for call_id in ids]
        answers = [
            {"role": "tool", "content": f"of {call_id}"}
            | ({"tool_call_id": call_id} if call_id else {})
            for call_id in results
        ]
        chat = [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
        first, second = ("c00001001", "c00001000") if ids[0] else ("c00001000", "c00001001")
        written = "<user>1+2?<eos>[add c00001000][add c00001001]<assistant><eos>"
        assert (
            prompt(chat, tokenizer)
            == f"{written}({first} of {results[0]})({second} of {results[1]})"
        )
    kept = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": CALL}]},
    ]
    answer = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}
    assert "[add abcdefghi]" in prompt([*kept, answer], tokenizer)
    assert "(abcdefghi 3)" in prompt([*kept, answer], tokenizer)


def test_no_arguments_are_an_empty_object(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=TEMPLATES["qwen"])
    for arguments in ("", None, {}, "{}"):
        turn = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": CALL | {"arguments": arguments}}],
        }
        assert "«[add{}]<eos>»" in sft([*ASK, turn], tokenizer)


def test_calls_and_results_that_a_template_skips_are_refused(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=TEMPLATES["phi"])
    (fields,) = FORMS["flat"]
    chat = [*ASK, {"role": "assistant", **fields}, {"role": "tool", "content": "3"}, *ANSWER]
    with pytest.raises(
        ValueError, match=r"leaves out what turn 2, of the role 'assistant', calls: 'add'"
    ):
        sft(chat, tokenizer)
    with pytest.raises(ValueError, match=r"leaves out turn 2, of the role 'tool': '3'"):
        sft([*ASK, *chat[2:]], tokenizer)


# A prompt that ends in a turn of the assistant

OPENED = {  # up to the text of the turn
    "qwen": "<user>1+2?<eos>\n<assistant>{}",
    "deepseek": "<bos><user>1+2?<assistant>{}",
    "mistral": "<bos><user>1+2? {}",
    "phi": "<user>\n1+2?<pad>\n<assistant>\n{}",
    "llama": "<bos>[user]\n1+2?<eos>[assistant]\n{}",
    "qwen3": "<user>1+2?<eos>\n<assistant>{}",
}
ENDS = {"phi": "<pad>\n<eos>"}
NO_THOUGHT = "<think>\n\n</think>\n\n"


def opened(family, prefill):
    """The prompt as text, by hand; before an answer Qwen3's template writes an empty thought."""
    thought = NO_THOUGHT if family == "qwen3" and not prefill.startswith("<think>") else ""
    return OPENED[family].format(thought + prefill)


@pytest.mark.parametrize("prefill", ["<think>\n", "The answer is"])
def test_a_prompt_ends_where_its_last_turn_of_the_assistant_ends(family, tokenizer, prefill):
    written = opened(family, prefill)
    chat = [*ASK, *turns(assistant=prefill)]
    (row,) = load("prompts", [{"prompt": chat, "label": "3"}], tokenizer, **WITH_CHAT)
    assert (row.text, tokenizer.decode(row.token_ids), row.messages) == (written, written, chat)


@pytest.mark.parametrize(
    "response", [" three.", turns(assistant=" three.")], ids=["a text", "a turn"]
)
def test_a_response_continues_the_turn_that_its_prompt_ends_in(family, tokenizer, response):
    chat = [*ASK, *turns(assistant="The answer is")]
    begun, end = opened(family, "The answer is"), ENDS.get(family, "<eos>")
    (example,) = load("sft", [{"prompt": chat, "completion": response}], tokenizer, **WITH_CHAT)
    assert shown(example, tokenizer) == f"{begun}« three.{end}»"
    (pair,) = load(
        "pairs",
        [{"prompt": chat, "chosen": response, "rejected": " four."}],
        tokenizer,
        **WITH_CHAT,
    )
    assert tokenizer.decode(pair.chosen_ids) == f"{begun} three.{end}"
    assert tokenizer.decode(pair.rejected_ids) == f"{begun} four.{end}"


def test_a_thought_that_the_prompt_begins_is_continued(make_tokenizer):
    chat = [*ASK, *turns(assistant="<think>\n")]
    row = {"prompt": chat, "completion": "2+1\n</think>\n\n3"}
    opens_thought = TEMPLATES["qwen3"].replace(
        "<assistant>{% endif %}", "<assistant><think>\n{% endif %}"
    )
    for name, template in (
        ("qwen", TEMPLATES["qwen"]),
        ("qwen3", TEMPLATES["qwen3"]),
        ("qwen3", opens_thought),
    ):
        tokenizer = make_tokenizer(chat_template=template)
        (example,) = load("sft", [row], tokenizer, **WITH_CHAT)
        assert shown(example, tokenizer) == OPENED[name].format(
            "<think>\n«2+1\n</think>\n\n3<eos>»"
        )
    with pytest.raises(ValueError, match=r"row 1 of file: .*turn 2"):
        load("sft", [row], make_tokenizer(chat_template=TEMPLATES["deepseek"]), **WITH_CHAT)


def test_turns_after_a_continued_one_are_targets_too(make_tokenizer):
    tokenizer = make_tokenizer(chat_template=TEMPLATES["qwen"])
    completion = [*turns(assistant=" three."), *turns(user="Sure?"), *turns(assistant="Yes.")]
    row = {"prompt": [*ASK, *turns(assistant="It is")], "completion": completion}
    (example,) = load("sft", [row], tokenizer, **WITH_CHAT)
    written = (
        "<user>1+2?<eos>\n<assistant>It is« three.<eos>»\n<user>Sure?<eos>\n<assistant>«Yes.<eos>»"
    )
    assert shown(example, tokenizer) == written


def test_a_template_that_closes_the_turn_in_its_text_is_refused(make_tokenizer):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('|')[0] }}<eos>{% endfor %}"
        + _OPEN
    )
    tokenizer = make_tokenizer(chat_template=template)
    with pytest.raises(
        ValueError, match=r"row 1 of file: the chat template cannot leave turn 2 open, 'so\|'"
    ):
        load("prompts", [{"prompt": [*ASK, *turns(assistant="so|")]}], tokenizer, **WITH_CHAT)
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}
    with pytest.raises(ValueError, match=r"turn 2 calls a tool, and no result follows"):
        prompt([*ASK, called], make_tokenizer(chat_template=TEMPLATES["qwen"]))


# Text that is rendered already


def test_prompts_that_are_rendered_already_are_named_once(family, tokenizer, caplog):
    texts = [render_prompt("1+2?", tokenizer, RowsConfig(**WITH_CHAT)).text] * 3
    with caplog.at_level(logging.WARNING):
        load("prompts", [{"prompt": text} for text in ("1+2?", *texts)], tokenizer, **WITH_CHAT)
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "rendered already" in record.getMessage()
    ]
    assert line.startswith("--prompt_data: 3 prompts are rendered already")
    assert "leave --apply_chat_template out" in line
    caplog.clear()
    load("prompts", [{"prompt": "1+2?"}, {"prompt": json.dumps(texts)}], tokenizer, **WITH_CHAT)
    load("prompts", [{"prompt": text} for text in texts], tokenizer)
    assert "rendered already" not in caplog.text
