"""Requests of OpenAI's clients: what both endpoints read alike, and what is refused."""

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

RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{
        name: (lambda value: not value, _NOT_HERE)
        for name in ("logit_bias", "presence_penalty", "frequency_penalty")
    },
    "repetition_penalty": (lambda value: value == 1, _NOT_HERE),
    **dict.fromkeys(
        ("response_format", "text"),
        (lambda form: "json_schema" not in json.dumps(form), _NO_SCHEMA),
    ),
    "functions": (lambda value: not value, "it is obsolete; use tools"),
    **dict.fromkeys(
        _LIMITS, (lambda n: type(n) is int and n > 0, "a positive whole number is needed")
    ),
    "n": (lambda n: type(n) is int and 0 < n <= 128, "a whole number between 1 and 128 is needed"),
    "top_logprobs": (lambda top: top in range(21), "a whole number between 0 and 20 is needed"),
    "stop": (
        lambda stop: type(stop) in (str, list) and {*map(type, stop)} <= {str} and all(stop),
        "texts are needed",
    ),
    **dict.fromkeys(("messages", "input"), (bool, "at least one is needed")),
    **dict.fromkeys(
        ("instructions", "turn"), (lambda value: type(value) is str, "a text is needed")
    ),
    **dict.fromkeys(("tools", "include"), (lambda value: type(value) is list, "a list is needed")),
    "stream_options": (lambda value: type(value) is dict, "an object is needed"),
}
"""What a field must be, unless it is null, and what is said of other values."""


class Refused(Exception):  # noqa: N818 (the request is at fault)
    """A request to answer with an error, which the client's SDK shall not send again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.json = {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": None,
            }
        }


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request, in which no field is what it must not be; ``Refused`` otherwise."""
    try:
        body = json.loads(raw or b"{}")
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the request must be a JSON object, and not {shortened(body)}.")
    for name, (is_right, message) in RULES.items():
        if (value := body.get(name)) is not None and not is_right(value):
            raise Refused(f"{name} {shortened(value)}: {message}.")
    return body


def read_options(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``Session.chat``: tools, the lowest limit on tokens, and texts at which an answer ends."""
    stop, limits = (
        body.get("stop") or (),
        [body[name] for name in _LIMITS if body.get(name) is not None],
    )
    stops = [stop] if isinstance(stop, str) else stop
    return {
        "tools": _tools(body.get("tools") or ()),
        "max_tokens": min(limits, default=None),
        "stop": stops,
    }


def _tools(given: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Function tools, nested as chat completions have them or flat as responses do, without ``strict``."""
    tools = []
    for tool in given:
        if tool["type"] != "function":
            raise Refused(
                f"tools: {shortened(tool)} is no function, and there are no other tools here."
            )
        function = tool.get("function", tool)
        kept = {
            key: value
            for key, value in function.items()
            if key not in ("type", "strict") and value is not None
        }
        tools.append({"type": "function", "function": kept})
        OpenAIFunctionToolSchema.model_validate(tools[-1])
    return tools


def read_content(content: Any) -> Any:
    """A text: of a string, null or a list of text parts; parts where images are among them; ``Refused`` for others."""
    parts = (
        content
        if isinstance(content, list)
        else [{"type": "text", "text": "" if content is None else content}]
    )
    made = [_part(part) for part in parts]
    return made if any(media_parts([{"content": made}])) else "".join(part["text"] for part in made)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """A text or an image, which no path of this machine may name."""
    if part["type"] in _TEXTS:
        return {"type": "text", "text": as_text(part["text"])}
    if part["type"] not in ("image_url", "input_image"):
        raise Refused(f"the policy reads texts and images, and not {shortened(part)}.")
    given = part["image_url"]
    url = as_text(given["url"] if isinstance(given, dict) else given)
    made = {"type": "image_url", "image_url": {"url": url}}
    if media_key(made) is None and not url.startswith(_IMAGES):
        raise Refused(f"{shortened(given)} is no image: send a data URL, data:image/png;base64,...")
    return made


def read_call(function: dict[str, Any], call_id: str) -> dict[str, Any]:
    """A tool call of an earlier turn in OpenAI's form."""
    called = {key: as_text(function[key]) for key in ("name", "arguments")}
    return {"id": as_text(call_id), "type": "function", "function": called}


def as_text(value: Any) -> str:
    """``value`` if it is a text; ``Refused`` otherwise."""
    if not isinstance(value, str):
        raise Refused(f"{shortened(value)} stands where a text is needed.")
    return value
