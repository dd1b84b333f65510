"""Requests of OpenAI's clients: the parts that both endpoints share, and the rules for refusal."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from openppo.agents.tools import OpenAIFunctionToolSchema
from openppo.datasets.message_parts import media_key, media_parts
from openppo.datasets.templates import shortened

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_IMAGES = ("data:image/", "http://", "https://")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_HERE = "the run decides how tokens are sampled; leave it out"
_NO_SCHEMA = "a schema would constrain sampling; describe the format in the prompt"


def _is_empty(value: Any) -> bool:
    return not value


def _has_no_schema(form: Any) -> bool:
    return "json_schema" not in json.dumps(form)


def _is_positive(n: Any) -> bool:
    return type(n) is int and n > 0


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_list(value: Any) -> bool:
    return type(value) is list


def _are_texts(stop: Any) -> bool:
    """True for a text, or a list of texts that are not empty."""
    return type(stop) in (str, list) and all(type(text) is str and text != "" for text in stop)


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logit_bias": (_is_empty, _NOT_HERE),
    "presence_penalty": (_is_empty, _NOT_HERE),
    "frequency_penalty": (_is_empty, _NOT_HERE),
    "repetition_penalty": (lambda value: value == 1, _NOT_HERE),
    "response_format": (_has_no_schema, _NO_SCHEMA),
    "text": (_has_no_schema, _NO_SCHEMA),
    "functions": (_is_empty, "it is obsolete; use tools"),
    **dict.fromkeys(_LIMITS, (_is_positive, "a positive whole number is needed")),
    "n": (lambda n: _is_positive(n) and n <= 128, "a whole number between 1 and 128 is needed"),
    "top_logprobs": (lambda top: top in range(21), "a whole number between 0 and 20 is needed"),
    "stop": (_are_texts, "texts are needed"),
    "messages": (bool, "at least one is needed"),
    "input": (bool, "at least one is needed"),
    "instructions": (_is_text, "a text is needed"),
    "turn": (_is_text, "a text is needed"),
    "tools": (_is_list, "a list is needed"),
    "include": (_is_list, "a list is needed"),
    "stream_options": (lambda value: type(value) is dict, "an object is needed"),
}
"""Test of a field that is not null, and the message for other values."""


class Refused(Exception):  # noqa: N818 (the request is at fault)
    """A request to answer with an error, which the client's SDK should not send again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self.json = {"error": error}


def read_body(raw: bytes) -> dict[str, Any]:
    """Read the JSON object of a request; ``Refused`` for other JSON, or against the rules."""
    try:
        body = json.loads(raw or b"{}")
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the request must be a JSON object, and not {shortened(body)}.")
    for name, (is_right, message) in RULES.items():
        value = body.get(name)
        if value is not None and not is_right(value):
            raise Refused(f"{name} {shortened(value)}: {message}.")
    return body


def read_options(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``Session.chat``: tools, the lowest limit on tokens, and texts at which an answer ends."""
    stop = body.get("stop") or ()
    limits = [body[name] for name in _LIMITS if body.get(name) is not None]
    return {
        "tools": _tools(body.get("tools") or ()),
        "max_tokens": min(limits, default=None),
        "stop": [stop] if isinstance(stop, str) else stop,
    }


def _tools(requested: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function tools, nested as in chat completions or flat as in responses, without ``strict``."""
    tools = []
    for tool in requested:
        if tool["type"] != "function":
            raise Refused(
                f"tools: {shortened(tool)} is no function, and there are no other tools here."
            )

        function = {}
        for key, value in tool.get("function", tool).items():
            if key not in ("type", "strict") and value is not None:
                function[key] = value
        tools.append({"type": "function", "function": function})
        OpenAIFunctionToolSchema.model_validate(tools[-1])
    return tools


def read_content(content: Any) -> Any:
    """Return the text of a string, null or a list of parts; parts if there are images.

    ``Refused`` for other content.
    """
    if content is None:
        return ""
    if not isinstance(content, list):
        return as_text(content)

    parts = [_part(part) for part in content]
    if any(media_parts([{"content": parts}])):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Read a text or an image; paths of this machine are refused."""
    if part["type"] in _TEXTS:
        return {"type": "text", "text": as_text(part["text"])}
    if part["type"] not in ("image_url", "input_image"):
        raise Refused(f"the policy reads texts and images, and not {shortened(part)}.")

    image = part["image_url"]
    url = as_text(image["url"] if isinstance(image, dict) else image)
    image_part = {"type": "image_url", "image_url": {"url": url}}
    if media_key(image_part) is None and not url.startswith(_IMAGES):
        raise Refused(f"{shortened(image)} is no image: send a data URL, data:image/png;base64,...")
    return image_part


def read_call(function: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Return a tool call of an earlier turn in OpenAI's form."""
    name = as_text(function["name"])
    arguments = as_text(function["arguments"])
    return {
        "id": as_text(call_id),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def as_text(value: Any) -> str:
    """Return ``value`` if it is a text; ``Refused`` otherwise."""
    if not isinstance(value, str):
        raise Refused(f"{shortened(value)} stands where a text is needed.")
    return value
