"""Codec of POST /v1/chat/completions: requests to messages, turns to completions and their chunks."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.requests import ROLES, Refused, as_text, read_call, read_content
from openppo.agents.renderer import Renderer
from openppo.agents.turn import Turn
from openppo.datasets.templates import Message
from openppo.types import FinishReason

FINISH = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}
"""Reasons in an answer; other turns were cut off: ``length``."""


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> list[Message]:
    """Read the messages of a request, which has the whole conversation; ``Refused`` names an error in it."""
    return [_read_message(message) for message in body["messages"]]


def _read_message(raw: dict[str, Any]) -> Message:
    if raw.get("function_call"):
        raise Refused("messages: function_call is obsolete; use tool_calls.")

    message: Message = {"role": ROLES[raw["role"]], "content": read_content(raw.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if raw.get(name):
            message[name] = as_text(raw[name])

    tool_calls = raw.get("tool_calls")
    if tool_calls:
        message["tool_calls"] = [read_call(call["function"], call["id"]) for call in tool_calls]
        message["content"] = message["content"] or None
    return message


def whole(
    body: dict[str, Any], turns: Sequence[Turn], renderer: Renderer, number: str, created: int
) -> dict[str, Any]:
    """Return the answer as one object."""
    choices = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {
            "index": index,
            "message": {"refusal": None, **turn.message},
            "logprobs": None,
            "finish_reason": FINISH.get(turn.finish_reason, "length"),
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"content": log_probs(turn, renderer), "refusal": None}
        choices.append(choice)

    n_read = len(turns[0].prompt_ids)
    n_sampled = sum(len(turn.completion.token_ids) for turn in turns)
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": created,
        "model": body.get("model"),
        "choices": choices,
        "usage": {
            "prompt_tokens": n_read,
            "completion_tokens": n_sampled,
            "total_tokens": n_read + n_sampled,
        },
    }


def lines(answer: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Stream the answer: for each choice its message, then the reason of its end; usage on request."""
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        chunks += _chunks(choice)
    if wants_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks]
        chunks.append({"choices": [], "usage": answer["usage"]})

    head = {name: answer[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for chunk in chunks:
        yield f"data: {json.dumps(head | chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _chunks(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A chunk with the message of a choice, and one with its end."""
    delta = choice["message"]
    tool_calls = delta.get("tool_calls")
    if tool_calls:
        indexed_calls = [{"index": i, **call} for i, call in enumerate(tool_calls)]
        delta = delta | {"tool_calls": indexed_calls}

    no_end = {"logprobs": None, "finish_reason": None}
    end = {name: choice[name] for name in no_end}
    for content, ending in ((delta, no_end), ({}, end)):
        yield {"choices": [{"index": choice["index"], "delta": content, **ending}]}


def log_probs(turn: Turn, renderer: Renderer) -> list[dict[str, Any]]:
    """Log-probs of all sampled tokens, including the one that ends the turn; alternatives are unknown."""
    tokens = []
    completion = turn.completion
    for token_id, log_prob in zip(completion.token_ids, completion.log_probs, strict=True):
        token = renderer.decode([token_id])
        tokens.append({"token": token, "logprob": log_prob, "bytes": None, "top_logprobs": []})
    return tokens
