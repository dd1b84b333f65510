"""POST /v1/chat/completions: requests to messages, turns to completions and their chunks."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.requests import Asked, Refused, called, check_fields, items, read_tools, text_of_parts
from openppo.agents.renderer import Renderer
from openppo.agents.session import Turn
from openppo.datasets.templates import Message, shortened
from openppo.types import FinishReason

_FINISH = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def read_chat(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> Asked:
    """A request, which has the whole conversation; ``Refused`` says what is wrong with it."""
    check_fields(body)
    messages = [_message(message) for message in items(body.get("messages"), "messages")]
    if not messages:
        raise Refused("messages is empty.")
    n = body.get("n") or 1
    return Asked(body, messages, read_tools(body.get("tools")), n, log_probs=bool(body.get("logprobs")))


def _message(given: object) -> Message:
    message = given if isinstance(given, dict) else {}
    role = message.get("role")
    if role not in _ROLES:
        raise Refused(f"messages: the role of {shortened(given)} is none of {', '.join(_ROLES)}.")
    kept = {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
    read: Message = {"role": _ROLES[role], "content": text_of_parts(message.get("content"), f"message of {role}")}
    if calls := items(message.get("tool_calls"), "tool_calls"):
        functions = [(call, call.get("function")) if isinstance(call, dict) else ({}, None) for call in calls]
        read["tool_calls"] = [
            called(function.get("name"), function.get("arguments"), call.get("id"))
            if isinstance(function, dict)
            else called(None, None, None)
            for call, function in functions
        ]
        read["content"] = read["content"] or None
    return read | kept


def completion(asked: Asked, turns: Sequence[Turn], renderer: Renderer, number: str, created: int) -> dict[str, Any]:
    """The answer as a whole."""
    choices = [
        {
            "index": i,
            "message": {"refusal": None, **turn.message},
            "logprobs": {"content": log_probs(turn, asked, renderer), "refusal": None} if asked.log_probs else None,
            "finish_reason": _FINISH.get(turn.finish_reason, "length"),
        }
        for i, turn in enumerate(turns)
    ]
    first = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": created, "model": asked.model}
    return {**first, "choices": choices, "usage": usage(turns)}


def chunks(whole: dict[str, Any], asked: Asked) -> Iterator[dict[str, Any]]:
    """The answer as events: role, text word by word, calls, reason of the end; usage if it was asked for."""
    wants_usage = bool((asked.body.get("stream_options") or {}).get("include_usage"))
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    head |= {"usage": None} if wants_usage else {}

    def chunk(choice: dict[str, Any], delta: dict[str, Any], end: bool = False) -> dict[str, Any]:
        ending = {name: choice[name] if end else None for name in ("logprobs", "finish_reason")}
        return head | {"choices": [{"index": choice["index"], "delta": delta, **ending}]}

    for choice in whole["choices"]:
        message = choice["message"]
        yield chunk(choice, {"role": "assistant", "content": "" if message["content"] is not None else None})
        for name in ("reasoning_content", "content"):
            for word in words(message.get(name) or ""):
                yield chunk(choice, {name: word})
        for i, call in enumerate(message.get("tool_calls") or []):
            yield chunk(choice, {"tool_calls": [{"index": i, **call}]})
        yield chunk(choice, {}, end=True)
    if wants_usage:
        yield head | {"choices": [], "usage": whole["usage"]}


def lines(whole: dict[str, Any], asked: Asked) -> Iterator[str]:
    """The answer as lines of a stream."""
    yield from (f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(whole, asked))
    yield "data: [DONE]\n\n"


def words(text: str) -> list[str]:
    """``text`` in pieces, each a word with the blanks after it."""
    return re.findall(r"\s*\S+\s*|\s+", text)


def log_probs(turn: Turn, asked: Asked, renderer: Renderer) -> list[dict[str, Any]]:
    """Log-probs of all sampled tokens, that of the end among them; of alternatives none are known."""
    sampled = zip(turn.completion.token_ids, turn.completion.log_probs, strict=True)
    texts = [(renderer.decode([token]), log_prob) for token, log_prob in sampled]
    tokens = [
        {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}
        for text, log_prob in texts
    ]
    return [token | {"top_logprobs": [token] if asked.body.get("top_logprobs") else []} for token in tokens]


def usage(turns: Sequence[Turn]) -> dict[str, int]:
    """Tokens that were read, once for all choices, and sampled."""
    read, sampled = len(turns[0].prompt_ids), sum(len(turn.completion.token_ids) for turn in turns)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
