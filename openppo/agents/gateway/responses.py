"""POST /v1/responses: items to messages, turns to items and their events."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from openppo.agents.gateway.chat import log_probs, usage, words
from openppo.agents.gateway.requests import Asked, Refused, called, check_fields, items, read_tools, text_of_parts
from openppo.agents.renderer import Renderer
from openppo.agents.session import Turn
from openppo.datasets.templates import Message, shortened
from openppo.types import FinishReason

_WITH_LOG_PROBS = "message.output_text.logprobs"


def read_responses(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> Asked:
    """A request; ``conversation_of`` gives the messages of an earlier response up to its end."""
    check_fields(body)
    before = body.get("previous_response_id")
    messages = conversation_of(before) if isinstance(before, str) else []
    given = body.get("input")
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(items(given, "input"))
    if not messages:
        raise Refused("input is empty.")
    if instructions := body.get("instructions"):
        messages.insert(0, {"role": "system", "content": text_of_parts(instructions, "instructions")})
    wanted = bool(body.get("top_logprobs")) or _WITH_LOG_PROBS in items(body.get("include"), "include")
    return Asked(body, messages, read_tools(body.get("tools")), log_probs=wanted, instructed=bool(instructions))


def _messages(given: Sequence[Any]) -> list[Message]:
    """Messages of items; reasoning, text and calls that follow each other are one turn of the model."""
    messages: list[Message] = []
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") in ("system", "developer", "user", "assistant"):
            role = "system" if item["role"] == "developer" else item["role"]
            text = text_of_parts(item.get("content"), f"message of {role}")
            if role == "assistant":
                _turn(messages, begun_by=("content", "tool_calls"))["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            thoughts = text_of_parts(item.get("content") or item.get("summary") or [], "reasoning")
            if thoughts:
                turn = _turn(messages, begun_by=("reasoning_content", "content", "tool_calls"))
                turn["reasoning_content"] = thoughts
        elif kind == "function_call":
            turn = _turn(messages, begun_by=())
            call = called(item.get("name"), item.get("arguments"), item.get("call_id"))
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_of_parts(item.get("output"), "function_call_output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise Refused(f"input: {shortened(item)} is no message, function_call, function_call_output or reasoning.")
    return [message if "content" in message else message | {"content": None} for message in messages]


def _turn(messages: list[Message], begun_by: Sequence[str]) -> Message:
    """The model's turn that an item belongs to: the last message, or a new one after one that has ``begun_by``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in begun_by):
        messages.append({"role": "assistant"})
    return messages[-1]


def response(asked: Asked, turns: Sequence[Turn], renderer: Renderer, number: str, created: int) -> dict[str, Any]:
    """The answer as a whole."""
    [turn] = turns
    tokens, cut = usage(turns), turn.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALL)
    known = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": asked.model,
        "output": _output(asked, turn, renderer, number, "incomplete" if cut else "completed"),
        "usage": {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens["total_tokens"],
        },
        "tools": asked.body.get("tools") or [],
        "tool_choice": asked.body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "metadata": asked.body.get("metadata") or {},
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        **{name: asked.body.get(name) for name in known},
    }


def _output(asked: Asked, turn: Turn, renderer: Renderer, number: str, status: str) -> list[dict[str, Any]]:
    message = turn.message
    output: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content})
    if message["content"] or not turn.tool_calls:
        probs = log_probs(turn, asked, renderer) if asked.log_probs else []
        part = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": probs}
        output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]})
    for i, call in enumerate(turn.tool_calls):
        output.append({"type": "function_call", "id": f"fc_{number}_{i}", "call_id": call["id"], **call["function"]})
    return [item | {"status": status} for item in output]


def events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answer as events, numbered from 0."""
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    numbers = count()

    def event(kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **more}

    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": i}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield event("output_item.added", output_index=i, item=item | empty | {"status": "in_progress"})
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield event("function_call_arguments.delta", **place, delta=arguments)
            yield event("function_call_arguments.done", **place, name=name, arguments=arguments)
        for part in item.get("content", ()):
            kind, place = part["type"], place | {"content_index": 0}
            probs = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            yield event("content_part.added", **place, part=part | {"text": ""} | ({"logprobs": []} if probs else {}))
            for word in words(part["text"]):
                yield event(f"{kind}.delta", **place, delta=word, **({"logprobs": []} if probs else {}))
            yield event(f"{kind}.done", **place, text=part["text"], **probs)
            yield event("content_part.done", **place, part=part)
        yield event("output_item.done", output_index=i, item=item)
    yield event(str(whole["status"]), response=whole)


def lines(whole: dict[str, Any], asked: Asked) -> Iterator[str]:
    """The answer as lines of a stream."""
    return (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events(whole))
