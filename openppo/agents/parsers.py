"""Tool calls in a model's text, in the format of its chat template.

Parsers are as strict as those of inference servers: a model must not learn calls that fail where it is deployed.
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
    """Name and arguments of a call, and the id that the model wrote, if its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """Calls, and the text around them; or no calls, the whole text, and the error in one of its calls."""

    content: str
    calls: list[ToolCall]
    error: str | None = None


Parser = Callable[[str, Tools], Parsed]
"""``parse(text, tools)``, for a model's text without its reasoning, and the tools offered to it."""
_Read = Callable[[str, re.Match[str], Tools], tuple[list[ToolCall], int]]
"""``read(text, opening, tools)`` returns the calls that begin at the match ``opening``, and their end.

There are none if it is other text. ``ValueError`` describes a malformed call for the model.
"""


def _parser(opening: str, read: _Read) -> Parser:
    """Make a parser of calls where ``opening`` matches outside of reasoning.

    If one call is malformed, all is text.
    """
    pattern = re.compile(rf"(?P<thought><think>(?:.*?</think>|.*))|(?:{opening})", re.DOTALL)

    def parse(text: str, tools: Tools) -> Parsed:
        calls: list[ToolCall] = []
        content = ""
        done = 0
        while match := pattern.search(text, done):
            if match["thought"] is not None:
                content += text[done : match.end()]
                done = match.end()
                continue

            try:
                new_calls, end = read(text, match, tools)
            except ValueError as problem:
                return Parsed(text, [], str(problem))
            content += text[done : match.start() if new_calls else end]
            calls += new_calls
            done = end

        content += text[done:]
        return Parsed(content.strip() if calls else content, calls)

    return parse


def _past(pattern: str, text: str, start: int) -> int:
    """Return the end of ``pattern`` at ``start``; ``start`` if it is not there."""
    match = re.compile(pattern).match(text, start)
    return match.end() if match else start


def _json(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON value of ``text`` after blanks at ``start``; return it and its end."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _past(r"\s*", text, start))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    # Also for NaN, half a surrogate pair, numbers of many digits.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The call is not valid JSON: {error}.") from error
    return value, end


def _fields(value: object) -> list[dict[str, Any]]:
    """Fields of each call in a JSON value: one call or a list, flat or in OpenAI's form."""
    values = value if isinstance(value, list) else [value]
    return [_flat(each) for each in values]


def _flat(call: object) -> dict[str, Any]:
    """Fields of a call, with those of its ``function``."""
    if not isinstance(call, dict):
        return {}
    function = call.get("function")
    return call | function if isinstance(function, dict) else call


def _calls(fields: list[dict[str, Any]]) -> list[ToolCall]:
    calls = []
    for call in fields:
        arguments = call.get("arguments", call.get("parameters"))
        calls.append(_call(call.get("name"), arguments, call.get("id")))
    return calls


def _call(name: object, arguments: object, call_id: object = None) -> ToolCall:
    if isinstance(arguments, str):
        arguments, _ = _json(arguments, 0)
    if not isinstance(name, str) or not name.strip():
        raise ValueError('The call lacks the name of a function, a text in "name".')
    if not isinstance(arguments, dict):
        raise ValueError(f'The arguments of the call of "{name}" must be a JSON object.')
    return ToolCall(name.strip(), arguments, call_id if isinstance(call_id, str) else None)


def _closed(text: str, end: int, closing: str) -> int:
    """Return the end of ``closing`` after a call; it may be missing at the end of the text."""
    place = _past(r"\s*", text, end)
    if not text.startswith(closing, place) and place < len(text):
        raise ValueError(f"{closing} must follow the JSON object of a call.")
    return min(place + len(closing), len(text))


def _hermes(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    value, end = _json(text, opening.end())
    return _calls(_fields(value)), _closed(text, end, "</tool_call>")


_JSON = r'(?:```(?:json)?\s*)?(?P<json>(?:\[\s*)?\{\s*"(?:name|type|function|id|arguments|parameters)"\s*:)'


def _bare(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Read JSON; without a mark it is a call only if it has a name and arguments."""
    value, end = _json(text, opening.start("json") if opening["json"] else opening.end())
    fields = _fields(value)
    have_arguments = all("arguments" in call or "parameters" in call for call in fields)
    if opening["json"] and not have_arguments:
        return [], end
    return _calls(fields), _past(r"\s*(?:```|;)", text, end)


_MISTRAL = r"\[TOOL_CALLS\](?:\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\]|(?=\{)))?"


def _mistral(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Read a list of calls in JSON, or, in newer models, name and arguments."""
    value, end = _json(text, opening.end())
    if opening["name"]:
        return [_call(opening["name"], value, opening["id"])], end
    return _calls(_fields(value)), end


_DEEPSEEK = (
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
    r"(?:\s*\w*<｜tool▁sep｜>(?P<typed>[^\n{`]+?)\s*```(?:json)?\s|(?P<name>[^{<]+)<｜tool▁sep｜>)?"
)


def _deepseek(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Read type, name and a block of JSON (V3, R1), or name and JSON (V3.1)."""
    name = opening["typed"] or opening["name"]
    if name is None:
        raise ValueError(
            "The name of a function and <｜tool▁sep｜> must follow <｜tool▁call▁begin｜>."
        )

    arguments, end = _json(text, opening.end())
    if opening["typed"]:
        end = _past(r"\s*```", text, end)
    end = _closed(text, end, "<｜tool▁call▁end｜>")
    return [_call(name, arguments)], _past(r"\s*<｜tool▁calls▁end｜>", text, end)


_QWEN = r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>|<tool_call>|<function="
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)


def _qwen3_coder(text: str, opening: re.Match[str], tools: Tools) -> tuple[list[ToolCall], int]:
    """Read a function in tags, with parameters in tags; their types are in the tool's schema."""
    function = opening["name"]
    if function is None:
        raise ValueError("<function=NAME> must follow <tool_call>.")

    schemas = _parameter_schemas(function, tools)
    arguments = {}
    end = opening.end()
    while match := _PARAMETER.match(text, end):
        name = match[1]
        value = match[2].removeprefix("\n").removesuffix("\n")
        if "<parameter=" in value:
            raise ValueError(f'</parameter> of "{name}" is missing.')
        arguments[name] = _typed(name, value, _types(schemas.get(name)))
        end = match.end()

    closed = _past(r"\s*</function>(?:\s*</tool_call>)?", text, end)
    if closed == end:
        raise ValueError(f'In the call of "{function}" a parameter or </function> is missing.')
    return [_call(function, arguments)], closed


def _parameter_schemas(function: str, tools: Tools) -> Mapping[str, Any]:
    """JSON schemas of a function's parameters by name; empty for a function that was not offered."""
    for tool in tools:
        if tool["function"]["name"] == function:
            parameters = tool["function"].get("parameters") or {}
            return parameters.get("properties") or {}
    return {}


_AS_JSON = {"True": "true", "False": "false", "None": "null"}
"""Values as the templates of this format write them."""
_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


def _typed(name: str, text: str, types: set[str]) -> Any:
    """Return ``text`` unchanged if ``types`` permit that or are unknown; else as JSON."""
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
    """Names of the types that a JSON schema permits; empty if it names none of JSON's."""
    if not schema:
        return set()

    type_names = schema.get("type") or ()
    if isinstance(type_names, str):
        type_names = [type_names]
    alternatives = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    return _TYPES.intersection(type_names).union(*map(_types, alternatives))


PARSERS: dict[str, Parser] = {
    "hermes": _parser("<tool_call>", _hermes),
    "llama3_json": _parser(rf"<\|python_tag\|>|{_JSON}", _bare),
    "mistral": _parser(_MISTRAL, _mistral),
    "qwen3_coder": _parser(_QWEN, _qwen3_coder),
    "deepseek": _parser(_DEEPSEEK, _deepseek),
    "json": _parser(_JSON, _bare),
}
"""Parsers by the names of ``--tool_parser``."""
_SIGNS = {
    "<｜tool▁call▁begin｜>": "deepseek",
    "[TOOL_CALLS]": "mistral",
    "<function=": "qwen3_coder",
    "<arg_key>": "",  # GLM's, which puts it into <tool_call>
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    "<|start_header_id|>": "llama3_json",
}
"""Parsers by a text that only templates of its format have; the first that occurs decides."""


def choose_parser(template: str | None, chosen: str, flag: str) -> str:
    """Return the name of the parser ``chosen``; "auto" is the one for the chat template's format.

    ``ValueError``, naming ``flag``, without a template; a warning for a template without a known format.
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
