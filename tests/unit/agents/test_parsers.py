"""Tool calls are read as the templates of real models write them."""

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from openppo.agents.parsers import PARSERS, Parsed, ToolCall, choose_parser
from tests.unit.agents.real_templates import render, trl_templates

N_CALLS = 10_000  # of each format
TYPES = ["string", "integer", "number", "boolean", "array", "object", ["integer", "null"]]
PROPERTIES: dict[str, Any] = {f"p{i}": {"type": kind} for i, kind in enumerate(TYPES)}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
}
SPECIMENS = [
    "<think>",
    "</think>",
    "</tool_call>",
    "<tool_call>",
    '{"name": "f", "arguments": {}}',
    "[TOOL_CALLS]",
]
LETTERS = "ab 0\n\t\"'\\/{}[]<>,:;|=`\u00e9\u4e2d\U0001f600\u2028\x7f"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"


def random_value(kind: Any, draw: random.Random, depth: int = 0) -> Any:
    if isinstance(kind, list):
        return None if draw.random() < 0.3 else random_value(kind[0], draw)
    if kind == "string":
        return "".join(draw.choice(LETTERS) for _ in range(draw.randrange(12))) + draw.choice(
            [*SPECIMENS, "", "", ""]
        )
    if kind in ("array", "object") and depth < 3:
        inner = [
            random_value(draw.choice(TYPES), draw, depth + 1) for _ in range(draw.randrange(3))
        ]
        return (
            inner if kind == "array" else {random_value("string", draw): value for value in inner}
        )
    return {"integer": draw.randrange(-(10**9), 10**9), "boolean": draw.random() < 0.5}.get(
        kind, draw.uniform(-9, 9)
    )


def random_calls(n: int, most: int = 3) -> Iterator[list[ToolCall]]:
    """Messages of up to ``most`` calls, ``n`` calls in all."""
    draw = random.Random(0)
    while n > 0:
        size = min(n, draw.randint(1, most))
        n -= size
        names = [[name for name in PROPERTIES if draw.random() < 0.5] for _ in range(size)]
        yield [
            ToolCall("f", {p: random_value(PROPERTIES[p]["type"], draw) for p in chosen})
            for chosen in names
        ]


def messages_of(calls: list[ToolCall], as_text: bool) -> list[dict[str, Any]]:
    functions = [
        {"name": call.name, "arguments": json.dumps(call.arguments) if as_text else call.arguments}
        for call in calls
    ]
    named = [
        {"id": f"call{i:05d}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": named},
    ]


# Formats by hand, for those without a template at hand: what the models' documentation shows.
def write_mistral(call: ToolCall) -> str:
    return f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}"


def write_mistral_with_id(call: ToolCall) -> str:
    return f"[TOOL_CALLS]{call.name}[CALL_ID]abcdefghi[ARGS]{json.dumps(call.arguments, ensure_ascii=False)}"


def write_deepseek(call: ToolCall) -> str:
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{json.dumps(call.arguments)}<｜tool▁call▁end｜>"


def write_hermes(call: ToolCall) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {json.dumps(call.arguments)}}}\n</tool_call>\n'


def write_llama(call: ToolCall) -> str:
    body = json.dumps(
        {"type": "function", "name": call.name, "parameters": call.arguments}, ensure_ascii=False
    )
    return f"<|python_tag|>{body}; "


def write_json(call: ToolCall) -> str:
    return (
        f"```json\n{json.dumps({'name': call.name, 'arguments': call.arguments}, indent=2)}\n```\n"
    )


def write_openai(call: ToolCall) -> str:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return json.dumps([{"id": "call_1", "type": "function", "function": function}]) + "\n"


def write_qwen3_coder(call: ToolCall) -> str:
    as_text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()}
    parameters = "".join(
        f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in as_text.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>\n"


BY_HAND: list[tuple[str, Callable[[ToolCall], str], str]] = [
    ("hermes", write_hermes, "{}"),
    ("llama3_json", write_llama, "{}"),
    ("mistral", write_mistral, "{}"),
    ("mistral", write_mistral_with_id, "{}"),
    ("deepseek", write_deepseek, DEEPSEEK),
    ("qwen3_coder", write_qwen3_coder, "{}"),
    ("json", write_json, "{}"),
    ("json", write_openai, "{}"),
]


@pytest.mark.parametrize(
    ("name", "write", "around"), BY_HAND, ids=lambda value: getattr(value, "__name__", "")
)
def test_written_calls_are_read(name, write, around):
    for calls in random_calls(N_CALLS // 5):
        parsed = PARSERS[name](around.format("".join(map(write, calls))), [TOOL])
        assert [(call.name, call.arguments) for call in parsed.calls] == [
            (call.name, call.arguments) for call in calls
        ]
        assert parsed.error is None and not parsed.content


TRL = {  # template: parser, arguments as text, calls in one message
    "qwen2_5": ("hermes", False, 3),
    "qwen3": ("hermes", False, 3),
    "llama3_1": ("llama3_json", False, 1),
    "llama3_2": ("llama3_json", False, 1),
    "deepseekv3": ("deepseek", True, 3),
    "qwen3_5_think": ("qwen3_coder", False, 3),
    "qwen3_6": ("qwen3_coder", False, 3),
    "nemotron_3_nano": ("qwen3_coder", False, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("template", TRL)
def test_calls_are_read_as_templates_write_them(chat_tokenizer, template):
    name, as_text, most = TRL[template]
    text = trl_templates()[template]
    assert choose_parser(text, "auto", "") == name
    for calls in random_calls(N_CALLS, most):
        check_round_trip(name, render(chat_tokenizer, text, messages_of(calls, as_text)), calls)


@pytest.mark.parametrize(("model", "name"), [("qwen2.5", "hermes"), ("mistral-v3", "mistral")])
def test_calls_are_read_as_tokenizers_write_them(assets: Path, model, name):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / model)
    assert choose_parser(tokenizer.chat_template, "auto", "") == name
    for calls in random_calls(N_CALLS // 2):
        messages = messages_of(
            calls, name == "mistral"
        )  # its template writes objects in HTML's escapes
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        parsed = check_round_trip(name, text, calls)
        assert name != "mistral" or [call.id for call in parsed.calls] == [
            f"call{i:05d}" for i in range(len(calls))
        ]


def check_round_trip(name: str, text: str, calls: list[ToolCall]) -> Parsed:
    parsed = PARSERS[name](text.partition("question")[2], [TOOL])
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        (call.name, call.arguments) for call in calls
    ]
    assert parsed.error is None
    return parsed


def mutated(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 4)):
        at, n = draw.randrange(len(text) + 1), draw.randrange(1, 9)
        put = draw.choice(
            ["", text[n : 2 * n], draw.choice(SPECIMENS), draw.choice(LETTERS), "\ud800", "[[[[{{"]
        )
        text = text[:at] + put + text[at + n * draw.randrange(2) :]
    return text if draw.random() < 0.8 else text[: draw.randrange(len(text) + 1)]


@pytest.mark.parametrize(
    ("name", "write", "around"), BY_HAND, ids=lambda value: getattr(value, "__name__", "")
)
def test_mutated_calls_raise_nothing(name, write, around):
    draw, n_errors = random.Random(1), 0
    for calls in random_calls(N_CALLS // 4, most=2):
        parsed = PARSERS[name](mutated(around.format("".join(map(write, calls))), draw), [TOOL])
        json.dumps([call.arguments for call in parsed.calls], allow_nan=False, ensure_ascii=False)
        assert parsed.error is None or parsed.error.endswith(".")
        n_errors += parsed.error is not None
    assert n_errors > 100


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "[", '[{"name":', "<function=a><parameter=b>", "<think>", "{" * 9]
)
def test_long_nonsense_raises_nothing(name, piece):
    parsed = PARSERS[name](piece * 3_000, [TOOL])
    assert not parsed.calls and parsed.content


WRITTEN = [
    (name, around.format(write(ToolCall("f", {"p0": "x"})))) for name, write, around in BY_HAND
]


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_text_around_a_call_is_content(name, text):
    parsed = PARSERS[name](f"I look it up.\n{text}", [TOOL])
    assert (len(parsed.calls), parsed.content, parsed.error) == (1, "I look it up.", None)


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_a_call_in_reasoning_is_no_call(name, text):
    later = f"Well.\n<think>I might {text}</think>"
    assert PARSERS[name](later, [TOOL]) == Parsed(later, [])
    assert len(PARSERS[name](f"{later}\n{text}", [TOOL]).calls) == 1
    assert PARSERS[name](f"<think>{text}", [TOOL]).calls == []


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>',
            "Expecting ':' delimiter",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call>',
            'arguments of the call of "f" must be a JSON object',
        ),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "lacks the name"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}} now</tool_call>',
            "</tool_call> must follow",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            "not valid JSON",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
            "not valid JSON",
        ),
        ("hermes", "<tool_call>f(1)</tool_call>", "not valid JSON"),
        ("llama3_json", "<|python_tag|>f.call(a=1)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]f[ARGS](1)", "not valid JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": 1}]', "must be a JSON object"),
        ("deepseek", "<｜tool▁call▁begin｜>f()<｜tool▁call▁end｜>", "<｜tool▁sep｜> must follow"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "<function=NAME> must follow"),
        (
            "qwen3_coder",
            "<function=f><parameter=p1>two</parameter></function>",
            '"p1" must be of type integer',
        ),
        ("qwen3_coder", "<function=f><parameter=p1>2</function>", "</function> is missing"),
        (
            "qwen3_coder",
            "<function=f><parameter=p0>a\n<parameter=p1>2</parameter></function>",
            '</parameter> of "p0"',
        ),
        ("json", '{"name": "f", "arguments": {"a": 1}', "Expecting ',' delimiter"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(name, text, says):
    parsed = PARSERS[name](text, [TOOL])
    assert says in str(parsed.error) and parsed.content == text and not parsed.calls


def test_beside_a_malformed_call_nothing_is_a_call():
    text = write_hermes(ToolCall("g", {})) + "<tool_call>f(1)</tool_call>"
    parsed = PARSERS["hermes"](text, [TOOL])
    assert parsed.error and (parsed.content, parsed.calls) == (text, [])


def test_a_stop_string_may_have_cut_the_closing_tag():
    assert PARSERS["hermes"](
        write_hermes(ToolCall("f", {})).removesuffix("</tool_call>\n"), []
    ).calls


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text", ["", "42", '{"name": "Ada", "age": 36}', "[1, 2]", "a < b {c}", "```json\n{}\n```"]
)
def test_other_text_is_no_call(name, text):
    assert PARSERS[name](text, [TOOL]) == Parsed(text, [])


def test_values_in_tags_get_the_types_of_their_schema():
    kinds = {
        "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "b": {"type": ["string", "integer"]},
        "c": {},
        "d": {"type": "number"},
        "e": {"type": "boolean"},
    }
    tool = {"type": "function", "function": {"name": "g", "parameters": {"properties": kinds}}}
    written = {"a": "None", "b": "7", "c": "7", "d": "7", "e": "True", "unknown": "7"}
    text = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items()
    )
    [call] = PARSERS["qwen3_coder"](f"<function=g>\n{text}</function>", [tool]).calls
    assert call.arguments == {"a": None, "b": "7", "c": "7", "d": 7, "e": True, "unknown": "7"}


ODD: list[Any] = [
    None,
    {},
    {"properties": {"q": {}}},
    {"properties": {"p0": {"anyOf": [{"type": "str"}]}}},
]
ODD += [{"properties": {"p0": {"type": kind}}} for kind in (None, ["int", "null"], "int")]


@pytest.mark.parametrize("schema", ODD, ids=str)
def test_what_a_schema_does_not_say_is_a_text(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    parsed = PARSERS["qwen3_coder"](write_qwen3_coder(ToolCall("f", {"p0": "7"})), [tool])
    assert parsed.calls == [ToolCall("f", {"p0": "7"})]


FORMATS = {
    "hermes": {"qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"},
    "qwen3_coder": {
        "nemotron_3_nano",
        "nemotron_3_super",
        "nemotron_3_ultra",
        "nemotron_3_5_lightning",
        "qwen3_6",
    }
    | {"qwen3_8", "qwen3_5_nothink", "qwen3_5_think"},
    "deepseek": {"deepseekv3", "deepseek_r1_distill"},
    "llama3_json": {"llama3", "llama3_1", "llama3_2"},
}


def test_the_template_tells_the_format():
    for name, template in trl_templates().items():
        of = [
            parser for parser, names in FORMATS.items() if name.removesuffix("_training") in names
        ]
        assert choose_parser(template, "auto", "") == (of or ["json"])[0], name


def test_an_unknown_format_is_said(caplog):
    with caplog.at_level(logging.WARNING, "openppo"):
        assert choose_parser("{{ messages }}", "auto", "") == "json"
        assert choose_parser("<tool_call>{{ name }}<arg_key>", "auto", "") == "json"
    assert caplog.text.count("plain JSON") == 2
