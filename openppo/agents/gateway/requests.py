"""Requests of OpenAI's clients: what both endpoints read alike, and what is refused."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from openppo.datasets.templates import shortened

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_HERE = "the run decides how tokens are sampled; leave it out"
_NO_SCHEMA = "a schema would constrain sampling; describe the format in the prompt"

RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: (lambda value: not value, _NOT_HERE) for name in ("logit_bias", "presence_penalty", "frequency_penalty")},
    "repetition_penalty": (lambda value: value == 1, _NOT_HERE),
    "response_format": (lambda form: form.get("type") != "json_schema", _NO_SCHEMA),
    "text": (lambda text: (text.get("format") or {}).get("type") != "json_schema", _NO_SCHEMA),
    "functions": (lambda value: not value, "this is of an older interface; use tools"),
    **dict.fromkeys((*_LIMITS, "n"), (lambda n: type(n) is int and n > 0, "a positive whole number is needed")),
    "top_logprobs": (lambda top: top in range(21), "a whole number between 0 and 20 is needed"),
    "stop": (all, "a text or a list of texts is needed"),
}
"""What a field must be, unless it is null, and what is said of other values."""


class Refused(Exception):  # noqa: N818 (the request is at fault)
    """A request to answer with an error, which the client's SDK shall not send again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.json = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request, in which no field is what it must not be; ``Refused`` otherwise."""
    try:
        body = json.loads(raw or b"{}")
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from error
    for name, (is_right, message) in RULES.items():
        if (value := body.get(name)) is not None and not is_right(value):
            raise Refused(f"{name} {shortened(value)}: {message}.")
    return body


def read_options(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``Session.chat``: tools, the lowest limit on tokens, and texts at which an answer ends."""
    stop, limits = body.get("stop") or (), [body[name] for name in _LIMITS if body.get(name) is not None]
    stops = [stop] if isinstance(stop, str) else stop
    return {"tools": _tools(body.get("tools") or ()), "max_tokens": min(limits, default=None), "stop": stops}


def _tools(given: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function tools, nested as chat completions have them or flat as responses do, without ``strict``."""
    tools = []
    for tool in given:
        if tool["type"] != "function":
            raise Refused(f"tools: {shortened(tool)} is no function, and there are no other tools here.")
        function = tool.get("function", tool)
        kept = {key: value for key, value in function.items() if key not in ("type", "strict") and value is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def read_text(content: Any) -> str:
    """Text of a content: a string, null or a list of text parts; ``Refused`` for images and other parts."""
    parts = [{"type": "text", "text": content or ""}] if not isinstance(content, list) else content
    for part in parts:
        if part["type"] not in _TEXTS:
            raise Refused(f"the policy reads text only, and not {shortened(part)}.")
    return "".join(part["text"] for part in parts)


def read_call(function: dict[str, Any], call_id: str) -> dict[str, Any]:
    """A tool call of an earlier turn in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {key: function[key] for key in ("name", "arguments")}}
