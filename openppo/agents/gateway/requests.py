"""Requests of OpenAI's clients: what both endpoints read alike, and what is refused."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openppo.datasets.templates import Message, shortened
from openppo.types import SamplingParams

MOST_TOP_LOG_PROBS = 20
ADVISORY = (
    "background include metadata parallel_tool_calls prompt_cache_key prompt_cache_retention reasoning "
    "reasoning_effort safety_identifier seed service_tier store stream_options text tool_choice truncation user "
    "verbosity"
).split()
"""Fields without an effect on what is sampled, which clients send by themselves."""
READ = (
    "frequency_penalty function_call functions input instructions logit_bias logprobs max_completion_tokens "
    "max_output_tokens max_tokens messages model n presence_penalty previous_response_id repetition_penalty "
    "response_format stop stream temperature tools top_k top_logprobs top_p"
).split()


class Refused(Exception):  # noqa: N818 (the request is at fault)
    """A request to answer with an error, which the client's SDK shall not send again."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


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
    def max_tokens(self) -> int | None:
        """The lowest limit that was given."""
        names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
        return min((self.body[name] for name in names if self.body.get(name) is not None), default=None)

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts at which an answer ends."""
        given = self.body.get("stop") or ()
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))

    @property
    def model(self) -> str:
        """The name that the client gave the policy."""
        return str(self.body.get("model") or "openppo")

    def overridden(self, params: SamplingParams) -> list[str]:
        """Options of sampling that the client has otherwise than the run."""
        given = {name: self.body.get(name) for name in ("temperature", "top_p", "top_k")}
        return [name for name, value in given.items() if value not in (None, getattr(params, name))]


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request whose fields of both endpoints are right; ``Refused`` otherwise."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(f"the request is no JSON object but {shortened(body)}")
    return body


def check_fields(body: dict[str, Any]) -> None:
    """``Refused`` for what would change how tokens are sampled, and for limits and stops of another type."""
    for name in ("logit_bias", "presence_penalty", "frequency_penalty"):
        if body.get(name):
            raise Refused(f"{name}: the run decides how tokens are sampled. Leave it out.")
    if body.get("repetition_penalty") not in (None, 1):
        raise Refused("repetition_penalty: the run decides how tokens are sampled. Leave it out.")
    text = body.get("text")
    for form in (body.get("response_format"), text.get("format") if isinstance(text, dict) else None):
        if isinstance(form, dict) and form.get("type") == "json_schema":
            raise Refused("a format with a schema would constrain sampling: describe the format in the prompt instead.")
    if body.get("functions") or body.get("function_call"):
        raise Refused("functions and function_call are of an older interface: use tools.")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        if (value := body.get(name)) is not None and (type(value) is not int or value < 1):
            raise Refused(f"{name} {shortened(value)} is no positive whole number.")
    top = body.get("top_logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= MOST_TOP_LOG_PROBS):
        raise Refused(f"top_logprobs {shortened(top)} is not between 0 and {MOST_TOP_LOG_PROBS}.")
    stop = body.get("stop") or []
    if not all(isinstance(text, str) and text for text in ([stop] if isinstance(stop, str) else items(stop, "stop"))):
        raise Refused(f"stop {shortened(stop)} is neither a text nor a list of texts.")


def read_tools(given: object) -> list[dict[str, Any]]:
    """Function tools, nested as chat completions have them or flat as responses do, without ``strict``."""
    tools = []
    for tool in items(given, "tools"):
        function = tool.get("function", tool) if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(f"tools: {shortened(tool)} is no function with a name, and no other tools are here.")
        kept = {key: value for key, value in function.items() if key not in ("type", "strict") and value is not None}
        tools.append({"type": "function", "function": kept})
    return tools


def items(given: object, name: str) -> Sequence[Any]:
    """A list, empty for null."""
    if given is not None and not isinstance(given, list):
        raise Refused(f"{name} {shortened(given)} is no list.")
    return given or []


def text_of_parts(content: object, where: str) -> str:
    """Text of a content: a string, null or text parts; ``Refused`` for images and other parts, and broken text."""
    parts: Iterable[Any] = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"):
            raise Refused(f"{where}: the policy reads text only, and this is a part of type {shortened(kind)}.")
        if text is not None and not isinstance(text, str):
            raise Refused(f"{where}: {shortened(part)} has no text.")
        texts.append(text or "")
    joined = "".join(texts)
    if not joined.isascii() and any("\ud800" <= letter <= "\udfff" for letter in joined):
        raise Refused(f"{where}: a text has half a surrogate pair, which is no character.")
    return joined


def called(name: object, arguments: object, call_id: object) -> dict[str, Any]:
    """A tool call of an earlier turn in OpenAI's form."""
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise Refused(f"a tool call needs a name and arguments as text: {shortened([name, arguments])}.")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
