"""POST /v1/chat/completions: requests to messages, turns to completions and their chunks."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.requests import ROLES, Refused, as_text, read_call, read_content
from openppo.agents.renderer import Renderer
from openppo.agents.turn import Turn
from openppo.datasets.templates import Message
from openppo.types import FinishReason

FINISH = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}
"""Reasons on the wire; other turns were cut off: ``length``."""


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> list[Message]:
    """Messages of a request, which has the whole conversation; ``Refused`` says what is wrong with it."""
    return [_message(message) for message in body["messages"]]


def _message(given: dict[str, Any]) -> Message:
    if given.get("function_call"):
        raise Refused("messages: function_call is obsolete; use tool_calls.")
    made: Message = {"role": ROLES[given["role"]], "content": read_content(given.get("content"))}
    made |= {
        name: as_text(given[name])
        for name in ("name", "tool_call_id", "reasoning_content")
        if given.get(name)
    }
    if calls := given.get("tool_calls"):
        made["tool_calls"] = [read_call(call["function"], call["id"]) for call in calls]
        made["content"] = made["content"] or None
    return made


def whole(
    body: dict[str, Any], turns: Sequence[Turn], renderer: Renderer, number: str, created: int
) -> dict[str, Any]:
    """The answer as one object."""
    choices = [
        {
            "index": i,
            "message": {"refusal": None, **turn.message},
            "logprobs": {"content": log_probs(turn, renderer), "refusal": None}
            if body.get("logprobs")
            else None,
            "finish_reason": FINISH.get(turn.finish_reason, "length"),
        }
        for i, turn in enumerate(turns)
    ]
    kind = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": created}
    read, sampled = len(turns[0].prompt_ids), sum(len(turn.completion.token_ids) for turn in turns)
    usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
    return {**kind, "model": body.get("model"), "choices": choices, "usage": usage}


def lines(answer: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """The answer as a stream: for each choice its message, then the reason of its end; usage if it was asked for."""
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {name: answer[name] for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        delta, end = (
            choice["message"],
            {name: choice[name] for name in ("logprobs", "finish_reason")},
        )
        if calls := delta.get("tool_calls"):
            delta = delta | {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
        for said, ending in ((delta, dict.fromkeys(end)), ({}, end)):
            chunks.append({"choices": [{"index": choice["index"], "delta": said, **ending}]})
    if wants_usage:
        chunks = [chunk | {"usage": None} for chunk in chunks] + [
            {"choices": [], "usage": answer["usage"]}
        ]
    yield from (f"data: {json.dumps(head | chunk)}\n\n" for chunk in chunks)
    yield "data: [DONE]\n\n"


def log_probs(turn: Turn, renderer: Renderer) -> list[dict[str, Any]]:
    """Log-probs of all sampled tokens, that of the end among them; of alternatives none are known."""
    sampled = zip(turn.completion.token_ids, turn.completion.log_probs, strict=True)
    return [
        {"token": renderer.decode([i]), "logprob": p, "bytes": None, "top_logprobs": []}
        for i, p in sampled
    ]
