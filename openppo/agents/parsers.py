"""Tool calls in the text of a model, by the format that its chat template asks for.

Readers are as strict as those of inference servers: a model must not learn calls that fail where it is deployed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openppo import logger

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


@dataclass(frozen=True)
class ToolCall:
    """Name and arguments of a call, and the id that the model gave it, where its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """Text around the calls, and the calls; or the whole text, and why a call in it cannot be read."""

    content: str
    calls: list[ToolCall]
    error: str | None = None


Parser = Callable[[str, Tools], Parsed]
"""``parse(text, tools)``: a model's text, without its reasoning, and the tools that it was offered."""
_Read = Callable[[str, re.Match[str], Tools], tuple[list[ToolCall], int]]
"""Calls that begin at a match, none if it is other text, and where they end; ``ValueError`` tells the model why not."""


def _parser(opening: str, read: _Read) -> Parser:
    """A parser that reads calls wherever ``opening`` matches outside of reasoning; all is text if one is malformed."""
    pattern = re.compile(rf"(?P<thought><think>(?:.*?</think>|.*))|(?:{opening})", re.DOTALL)

    def parse(text: str, tools: Tools) -> Parsed:
        calls: list[ToolCall] = []
        content, done = "", 0
        while found := pattern.search(text, done):
            try:
                more, end = (
                    read(text, found, tools) if found["thought"] is None else ([], found.end())
                )
            except ValueError as problem:
                return Parsed(text, [], str(problem))
            content += text[done : found.start() if more else end]
            calls, done = calls + more, end
        content += text[done:]
        return Parsed(content.strip() if calls else content, calls)

    return parse


def _past(pattern: str, text: str, start: int) -> int:
    """The end of ``pattern`` at ``start``; ``start`` if it is not there."""
    found = re.compile(pattern).match(text, start)
    return found.end() if found else start


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value of ``text`` after blanks at ``start``, and its end."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _past(r"\s*", text, start))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (
        ValueError,
        RecursionError,
    ) as error:  # also NaN, half a surrogate pair, numbers of many digits
        raise ValueError(f"The call is not valid JSON: {error}.") from error
    return value, end


def _fields(value: object) -> list[dict[str, Any]]:
    """Name, arguments and id of each call in a JSON value, which is one or a list, flat or in OpenAI's form."""
    calls = [
        one if isinstance(one, dict) else {}
        for one in (value if isinstance(value, list) else [value])
    ]
    return [
        call | call["function"] if isinstance(call.get("function"), dict) else call
        for call in calls
    ]


def _calls(fields: list[dict[str, Any]]) -> list[ToolCall]:
    return [
        _call(each.get("name"), each.get("arguments", each.get("parameters")), each.get("id"))
        for each in fields
    ]


def _call(name: object, arguments: object, its_id: object = None) -> ToolCall:
    if isinstance(arguments, str):
        arguments, _ = _json(arguments, 0)
    if not isinstance(name, str) or not name.strip():
        raise ValueError('The call lacks the name of a function, a text in "name".')
    if not isinstance(arguments, dict):
        raise ValueError(f'The arguments of the call of "{name}" must be a JSON object.')
    return ToolCall(name.strip(), arguments, its_id if isinstance(its_id, str) else None)


def _closed(text: str, end: int, closing: str) -> int:
    """The end of ``closing`` after a call; it may be missing at the end of the text."""
    place = _past(r"\s*", text, end)
    if not text.startswith(closing, place) and place < len(text):
        raise ValueError(f"{closing} must follow the JSON object of a call.")
    return min(place + len(closing), len(text))


def _hermes(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    value, end = _json(text, opening.end())
    return _calls(_fields(value)), _closed(text, end, "</tool_call>")


_JSON = r'(?:```(?:json)?\s*)?(?P<json>(?:\[\s*)?\{\s*"(?:name|type|function|id|arguments|parameters)"\s*:)'


def _bare(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """JSON without a mark of its own is a call if it has a name and arguments."""
    value, end = _json(text, opening.start("json") if opening["json"] else opening.end())
    fields = _fields(value)
    if opening["json"] and not all({"arguments", "parameters"} & each.keys() for each in fields):
        return [], end
    return _calls(fields), _past(r"\s*(?:```|;)", text, end)


_MISTRAL = r"\[TOOL_CALLS\](?:\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]|(?=\{)))?"


def _mistral(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """A list of calls in JSON, or, in newer models, name and arguments."""
    value, end = _json(text, opening.end())
    return [_call(opening["name"], value, opening["id"])] if opening["name"] else _calls(
        _fields(value)
    ), end


_DEEPSEEK = (
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
    r"(?:\s*\w*<｜tool▁sep｜>(?P<typed>[^\n{`]+?)\s*```(?:json)?\s|(?P<name>[^{<]+)<｜tool▁sep｜>)?"
)


def _deepseek(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Type, name and a block of JSON (V3, R1), or name and JSON (V3.1)."""
    if (name := opening["typed"] or opening["name"]) is None:
        raise ValueError(
            "The name of a function and <｜tool▁sep｜> must follow <｜tool▁call▁begin｜>."
        )
    arguments, end = _json(text, opening.end())
    end = _closed(
        text, _past(r"\s*```", text, end) if opening["typed"] else end, "<｜tool▁call▁end｜>"
    )
    return [_call(name, arguments)], _past(r"\s*<｜tool▁calls▁end｜>", text, end)


_QWEN = r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>|<tool_call>|<function="
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)


def _qwen3_coder(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """A function in tags, with parameters in tags, whose types are in the tool's schema."""
    if (function := opening["name"]) is None:
        raise ValueError("<function=NAME> must follow <tool_call>.")
    offered = [
        tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == function
    ]
    schemas = (offered[0] or {}).get("properties") or {} if offered else {}
    arguments, end = {}, opening.end()
    while found := _PARAMETER.match(text, end):
        name, value = found[1], found[2].removeprefix("\n").removesuffix("\n")
        if "<parameter=" in value:
            raise ValueError(f'</parameter> of "{name}" is missing.')
        arguments[name], end = _typed(name, value, _types(schemas.get(name))), found.end()
    closed = _past(r"\s*</function>(?:\s*</tool_call>)?", text, end)
    if closed == end:
        raise ValueError(f'In the call of "{function}" a parameter or </function> is missing.')
    return [_call(function, arguments)], closed


_AS_JSON = {"True": "true", "False": "false", "None": "null"}
"""Values as the templates of this format write them."""
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


def _typed(name: str, text: str, types: set[str]) -> Any:
    """``text`` as it is where that is permitted, or nothing is known; else as JSON."""
    text_in_json = _AS_JSON.get(text, text)
    if "null" in types and text_in_json == "null":
        return None
    if "string" in types or not types - {"null"}:
        return text
    with suppress(ValueError):
        value, end = _json(text_in_json, 0)
        if not text_in_json[end:].strip():
            return value
    raise ValueError(
        f'The parameter "{name}" must be of type {" or ".join(sorted(types))}, not {text[:80]!r}.'
    )


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    """Names of the types that a JSON schema permits; empty if it says none that JSON has."""
    schema = schema or {}
    own, parts = (
        schema.get("type") or (),
        [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())],
    )
    return _TYPES.intersection([own] if isinstance(own, str) else own).union(*map(_types, parts))


PARSERS: dict[str, Parser] = {
    "hermes": _parser("<tool_call>", _hermes),
    "llama3_json": _parser(rf"<\|python_tag\|>|{_JSON}", _bare),
    "mistral": _parser(_MISTRAL, _mistral),
    "qwen3_coder": _parser(_QWEN, _qwen3_coder),
    "deepseek": _parser(_DEEPSEEK, _deepseek),
    "json": _parser(_JSON, _bare),
}
"""By the names of ``--tool_parser``."""
_SIGNS = {
    "<｜tool▁call▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<arg_key>": "",  # GLM's, which puts it into <tool_call>
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    "<|start_header_id|>": "llama3_json",
}
"""What only the template of a format has; the first that occurs decides."""


def choose_parser(template: str | None, chosen: str, flag: str) -> str:
    """The parser that ``--tool_parser`` means; "auto" is the one whose format the chat template asks for.

    ``ValueError``, naming ``flag``, without a template; a warning where it has no known format.
    """
    if not template:
        raise ValueError(
            f"{flag}: the tokenizer has no chat template, which conversations are rendered with. Use a chat model, or "
            "set chat_template in its tokenizer_config.json."
        )
    if chosen != "auto":
        return chosen
    name = next((name for sign, name in _SIGNS.items() if sign in template), "")
    if not name:
        logger.warning(
            "the chat template has no known format of tool calls: plain JSON is expected"
        )
    logger.info(
        "--tool_parser auto: tool calls are read as %s, by the chat template", name or "json"
    )
    return name or "json"
