"""Tool calls in the text of a model, by the format that its chat template asks for.

Readers are as strict as those of inference servers: a model must not learn calls that fail where it is deployed.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.agents.matching import Tools


@dataclass(frozen=True)
class ToolCall:
    """Name and arguments of a call, and the id that the model gave it, where its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """Text around the calls, the calls, and why another could not be read, which stays in the text."""

    content: str
    calls: list[ToolCall]
    error: str | None = None


Parser = Callable[[str, Tools], Parsed]
"""``parse(text, tools)``: a model's text, without its reasoning, and the tools that it was offered."""
_Read = Callable[[str, re.Match[str], Tools], tuple[list[ToolCall], int]]
"""Calls that begin at a match, and where they end; none if this is other text; raises ``_Malformed``."""


class _Malformed(ValueError):  # noqa: N818 (an outcome)
    """A call that cannot be read; its message is for the model."""


def _parser(opening: str, read: _Read, closing: str | None = None) -> Parser:
    """A parser that reads calls wherever ``opening`` matches outside of reasoning.

    After a malformed call it goes on behind ``closing``; without one the rest is text.
    """
    pattern = re.compile(rf"(?P<thought><think>(?:.*?</think>|.*))|(?:{opening})", re.DOTALL)

    def parse(text: str, tools: Tools) -> Parsed:
        calls: list[ToolCall] = []
        content, error, done = "", None, 0
        while found := pattern.search(text, done):
            start, more = found.start(), list[ToolCall]()
            content, done = content + text[done:start], found.end()
            try:
                if found["thought"] is None:
                    more, done = read(text, found, tools)
            except _Malformed as problem:
                error = error or str(problem)
                done = len(text) - len(text[done:].partition(closing)[2] if closing else "")
            calls += more
            content += "" if more else text[start:done]
        content += text[done:]
        return Parsed(content.strip() if calls else content, calls, error)

    return parse


def _past(pattern: str, text: str, start: int) -> int:
    """The end of ``pattern`` at ``start``; ``start`` if it is not there."""
    found = re.compile(pattern).match(text, start)
    return found.end() if found else start


def _json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value of ``text`` after blanks at ``start``, and its end."""
    start = _past(r"\s*", text, start)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _Malformed(f"The call is not valid JSON: {error.msg} at character {error.pos - start}.") from error
    except (ValueError, RecursionError) as error:  # NaN, half a surrogate pair, numbers of many digits, deep nesting
        raise _Malformed(f"The call has a value that JSON cannot express: {error}.") from error
    return value, end


def _function(value: object) -> dict[str, Any]:
    """What has the name and the arguments of a call: flat, or within one in OpenAI's form; empty for no object."""
    call = value if isinstance(value, dict) else {}
    return call["function"] if isinstance(call.get("function"), dict) else call


def _call(value: object) -> ToolCall:
    function = _function(value)
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments, _ = _json(arguments, 0)
    its_id = value.get("id") if isinstance(value, dict) else None
    return _checked(function.get("name", function.get("function")), arguments, its_id)


def _checked(name: object, arguments: object, its_id: object = None) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        raise _Malformed('The call lacks the name of a function, a text in "name".')
    if not isinstance(arguments, dict):
        raise _Malformed(f'The arguments of the call of "{name}" must be a JSON object.')
    return ToolCall(name.strip(), arguments, its_id if isinstance(its_id, str) else None)


def _closed(text: str, end: int, closing: str) -> int:
    """The end of ``closing`` after a call; it may be missing at the end of the text."""
    place = _past(r"\s*", text, end)
    if not text.startswith(closing, place) and place < len(text):
        raise _Malformed(f"{closing} must follow the JSON object of a call.")
    return min(place + len(closing), len(text))


def _hermes(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    value, end = _json(text, opening.end())
    return [_call(value)], _closed(text, end, "</tool_call>")


def _bare(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """JSON without a mark of its own is a call if it has a name and arguments."""
    value, end = _json(text, opening.start("json") if opening["json"] else opening.end())
    values = value if isinstance(value, list) else [value]
    if opening["json"] and not all({"arguments", "parameters"} & _function(one).keys() for one in values):
        return [], end
    return [_call(one) for one in values], _past(r"\s*(?:```|;)", text, end)


_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]|(?=\{))")


def _mistral(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """A list of calls in JSON, or, in newer models, name and arguments."""
    if named := _NAMED.match(text, opening.end()):
        arguments, end = _json(text, named.end())
        return [_checked(named[1], arguments, named[2])], end
    value, end = _json(text, opening.end())
    return [_call(one) for one in (value if isinstance(value, list) else [value])], end


_DEEPSEEK = re.compile(r"(?:\s*\w*<｜tool▁sep｜>([^\n{`]+?)\s*```(?:json)?\s|([^{<]+)<｜tool▁sep｜>)")


def _deepseek(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Type, name and a block of JSON (V3, R1), or name and JSON (V3.1)."""
    named = _DEEPSEEK.match(text, opening.end())
    if named is None:
        raise _Malformed("The name of a function and <｜tool▁sep｜> must follow <｜tool▁call▁begin｜>.")
    arguments, end = _json(text, named.end())
    end = _closed(text, _past(r"\s*```", text, end) if named[1] else end, "<｜tool▁call▁end｜>")
    return [_checked(named[1] or named[2], arguments)], _past(r"\s*<｜tool▁calls▁end｜>", text, end)


_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)


def _qwen3_coder(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """A function in tags, with parameters in tags, whose types are in the tool's schema."""
    function = _FUNCTION.match(text, opening.start())
    if function is None:
        raise _Malformed("<function=NAME> must follow <tool_call>.")
    arguments, end = {}, function.end()
    schemas = _schemas(function[1], tools)
    while found := _PARAMETER.match(text, end):
        name, value = found[1], found[2].removeprefix("\n").removesuffix("\n")
        if "<parameter=" in value:
            raise _Malformed(f'</parameter> of "{name}" is missing.')
        arguments[name], end = _typed(name, value, schemas.get(name)), found.end()
    closed = _past(r"\s*</function>(?:\s*</tool_call>)?", text, end)
    if closed == end:
        raise _Malformed(f'In the call of "{function[1]}" a parameter or </function> is missing.')
    return [_checked(function[1], arguments)], closed


def _schemas(function: str, tools: Tools) -> Mapping[str, Any]:
    """Schemas of a function's parameters; empty if it is not offered."""
    offered = (tool.get("function", tool) for tool in tools)
    schema = next((one.get("parameters") for one in offered if one.get("name") == function), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


_WRITTEN = {"True": True, "False": False, "None": None}
"""Values as the templates of this format write them."""
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _typed(name: str, text: str, schema: object) -> Any:
    """``text`` as a value of its schema; as it is where that permits only texts or is unknown."""
    types = _types(schema)
    if types <= {"string"}:
        return text
    try:
        value, end = (_WRITTEN[text], len(text)) if text in _WRITTEN else _json(text, 0)
    except _Malformed:
        value, end = text, len(text)
    if text[end:].strip():
        value = text
    if "integer" in types and isinstance(value, float) and value.is_integer():
        value = int(value)
    its_type = _TYPES.get(type(value))
    if value is None or its_type in types or (its_type == "integer" and "number" in types):
        return value
    if "string" in types:
        return text
    raise _Malformed(f'The parameter "{name}" must be of type {" or ".join(sorted(types))}, not {text[:80]!r}.')


def _types(schema: object) -> set[str]:
    """Names of the types that a JSON schema permits; empty if it says none that JSON has."""
    if not isinstance(schema, Mapping):
        return set()
    lists = [schema.get(key) for key in ("type", "anyOf", "oneOf")]
    its, *parts = [given if isinstance(given, list) else [] if given is None else [given] for given in lists]
    known = {*_TYPES.values(), "null"}.intersection(name for name in its if isinstance(name, str))
    return known.union(*(_types(part) for part in chain(*parts)))


_JSON_CALL = r'(?:```(?:json)?\s*)?(?P<json>(?:\[\s*)?\{\s*"(?:name|type|function|id|arguments|parameters)"\s*:)'
PARSERS: dict[str, Parser] = {
    "hermes": _parser("<tool_call>", _hermes, "</tool_call>"),
    "llama3_json": _parser(rf"<\|python_tag\|>|{_JSON_CALL}", _bare),
    "mistral": _parser(r"\[TOOL_CALLS\]", _mistral),
    "qwen3_coder": _parser("<tool_call>|<function=", _qwen3_coder, "</tool_call>"),
    "deepseek": _parser("(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>", _deepseek, "<｜tool▁call▁end｜>"),
    "json": _parser(_JSON_CALL, _bare),
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


def choose_parser(template: str) -> str:
    """The parser whose format a chat template asks for; plain JSON, with a warning, if it is none of them."""
    name = next((name for sign, name in _SIGNS.items() if sign in template), "")
    if not name:
        logger.warning("the chat template has no format of tool calls that is known: they are expected as plain JSON")
    return name or "json"


def parser_for(tokenizer: PreTrainedTokenizerBase, chosen: str, flag: str) -> str:
    """The parser that ``--tool_parser`` means; ``ValueError``, naming ``flag``, without a chat template."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{flag}: the tokenizer has no chat template, which conversations are rendered with. Use a chat model, or "
            "set chat_template in its tokenizer_config.json."
        )
    if chosen != "auto":
        return chosen
    name = choose_parser(str(tokenizer.chat_template))
    logger.info("--tool_parser auto: tool calls are read as %s, by the chat template", name)
    return name
