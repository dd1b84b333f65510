"""Requests of OpenAI's clients: what both endpoints read alike, and what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openppo.datasets.templates import Message, shortened
from openppo.types import SamplingParams

_NOT_HERE = "the run decides how tokens are sampled; leave it out"
_NO_SCHEMA = "a schema would constrain sampling; describe the format in the prompt"
_OLD = "this is of an older interface; use tools"


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _has_no_schema(form: Any) -> bool:
    return isinstance(form, dict) and form.get("type") != "json_schema"


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: (lambda value: not value, _NOT_HERE) for name in ("logit_bias", "presence_penalty", "frequency_penalty")},
    "repetition_penalty": (lambda value: value == 1, _NOT_HERE),
    "response_format": (_has_no_schema, _NO_SCHEMA),
    "text": (lambda text: isinstance(text, dict) and _has_no_schema(text.get("format") or {}), _NO_SCHEMA),
    **{name: (lambda value: not value, _OLD) for name in ("functions", "function_call")},
    **dict.fromkeys(("max_tokens", "n"), (_is_count, "a positive whole number is needed")),
    **{f"max_{kind}_tokens": (_is_count, "a positive whole number is needed") for kind in ("completion", "output")},
    "top_logprobs": (lambda top: type(top) is int and 0 <= top <= 20, "a whole number between 0 and 20 is needed"),
    "stop": (
        lambda stop: isinstance(stop, str | list) and all(isinstance(text, str) and text for text in stop),
        "a text or a list of texts is needed",
    ),
    "stream_options": (lambda given: isinstance(given, dict), "an object is needed"),
}
"""What a field must be, unless it is null, and what is said of other values."""
READ = (
    "include input instructions logprobs messages metadata model parallel_tool_calls previous_response_id "
    "prompt_cache_key reasoning reasoning_effort safety_identifier seed service_tier store stream temperature "
    "tool_choice tools top_k top_p truncation user verbosity"
).split()
"""Further fields without a message: what is read, and what clients send by themselves."""


class Refused(Exception):  # noqa: N818 (the request is at fault)
    """A request to answer with an error, which the client's SDK shall not send again."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.json = {"error": {"message": message, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A request that was read: ``body`` as it came, and the arguments of ``Session.chat``, ``n`` times.

    ``instructed``: the first message are instructions of this request alone.
    """

    body: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]]
    n: int = 1
    log_probs: bool = False
    instructed: bool = False

    @property
    def limits(self) -> dict[str, Any]:
        """The lowest limit on tokens that was given, and texts at which an answer ends."""
        names, stop = ("max_tokens", "max_completion_tokens", "max_output_tokens"), self.body.get("stop") or ()
        lowest = min((self.body[name] for name in names if self.body.get(name) is not None), default=None)
        return {"max_tokens": lowest, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}

    def without_effect(self, params: SamplingParams) -> list[str]:
        """Options of sampling that the client has otherwise than the run."""
        given = {name: self.body.get(name) for name in ("temperature", "top_p", "top_k")}
        return [name for name, value in given.items() if value not in (None, getattr(params, name))]


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request, in which no field is what it must not be; ``Refused`` otherwise."""
    try:
        body = json.loads(raw or b"{}")
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the request is no JSON object but {shortened(body)}.")
    for name, (is_right, message) in RULES.items():
        if (value := body.get(name)) is not None and not is_right(value):
            raise Refused(f"{name} {shortened(value)}: {message}.")
    return body


def read_tools(given: object) -> list[dict[str, Any]]:
    """Function tools, nested as chat completions have them or flat as responses do, without ``strict``."""
    tools = []
    for tool in read_list(given, "tools"):
        function = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"tools: {shortened(tool)} is no function with a name, and there are no other tools here.")
        kept = {key: value for key, value in function.items() if key not in ("type", "strict") and value is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def read_list(given: object, name: str) -> Sequence[Any]:
    """A list, empty for null."""
    if given is not None and not isinstance(given, list):
        raise Refused(f"{name} {shortened(given)} is no list.")
    return given or []


def read_text(content: object, where: str) -> str:
    """Text of a content: a string, null or a list of text parts; ``Refused`` for images and other parts."""
    texts: list[Any] = []
    for part in content if isinstance(content, list) else [{"text": "" if content is None else content}]:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"):
            raise Refused(f"{where}: the policy reads text only, and not {shortened(part)}.")
        texts.append(part.get("refusal" if kind == "refusal" else "text"))
        if not isinstance(texts[-1], str):
            raise Refused(f"{where}: {shortened(part)} has no text.")
    return "".join(texts)


def read_call(function: object, call_id: object) -> dict[str, Any]:
    """A tool call of an earlier turn in OpenAI's form."""
    named = {key: function.get(key) for key in ("name", "arguments")} if isinstance(function, dict) else {}
    if not named or not all(isinstance(value, str) for value in named.values()):
        raise Refused(f"a tool call needs a name and arguments, both texts: {shortened(function)}.")
    return {"id": call_id, "type": "function", "function": named}
