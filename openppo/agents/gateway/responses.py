"""Codec of POST /v1/responses: items to messages, turns to items and their events."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.chat import FINISH, log_probs
from openppo.agents.gateway.requests import ROLES, Refused, as_text, read_call, read_content
from openppo.agents.renderer import Renderer
from openppo.agents.turn import Turn
from openppo.datasets.templates import Message, shortened


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> list[Message]:
    """Read the messages of a request; ``conversation_of`` returns those of an earlier response up to its end."""
    items = body["input"]
    previous_id = body.get("previous_response_id")
    messages = conversation_of(previous_id) if previous_id else []
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        messages += _read_items(items)

    instructions = body.get("instructions")
    if instructions:
        return [{"role": "system", "content": instructions}, *messages]
    return messages


def _read_items(items: Iterable[dict[str, Any]]) -> list[Message]:
    """Messages of items; reasoning, text and calls that follow each other are one turn of the model."""
    messages: list[Message] = []
    for item in items:
        last = messages[-1] if messages else {}
        message = _read_item(item)
        calls = message.get("tool_calls")
        has_answered = last.get("content") or last.get("tool_calls")
        is_same_turn = message["role"] == last.get("role") == "assistant"
        if not is_same_turn or (has_answered and not calls):
            messages.append({"content": None, **message})
            continue

        if calls:
            message["tool_calls"] = [*last.get("tool_calls", ()), *calls]
        last |= message
    return messages


def _read_item(item: dict[str, Any]) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": ROLES[item["role"]], "content": read_content(item["content"])}
    if kind == "reasoning":
        reasoning = read_content(item.get("content") or item.get("summary"))
        return {"role": "assistant", "reasoning_content": reasoning}
    if kind == "function_call":
        return {"role": "assistant", "tool_calls": [read_call(item, item["call_id"])]}
    if kind == "function_call_output":
        call_id = as_text(item["call_id"])
        return {"role": "tool", "tool_call_id": call_id, "content": read_content(item["output"])}
    raise Refused(
        f"input: {shortened(item)} is no message, function_call, function_call_output or reasoning."
    )


def whole(
    body: dict[str, Any], turns: Sequence[Turn], renderer: Renderer, number: str, created: int
) -> dict[str, Any]:
    """Return the answer as one object."""
    turn = turns[0]
    is_complete = turn.finish_reason in FINISH
    status = "completed" if is_complete else "incomplete"
    n_read = len(turn.prompt_ids)
    n_sampled = len(turn.completion.token_ids)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": created,
        "model": body.get("model"),
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "output": _output(body, turn, renderer, number=number, status=status),
        "usage": {
            "input_tokens": n_read,
            "output_tokens": n_sampled,
            "total_tokens": n_read + n_sampled,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "status": status,
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
    }


def _output(
    body: dict[str, Any], turn: Turn, renderer: Renderer, number: str, status: str
) -> list[dict[str, Any]]:
    """Items of a turn: reasoning, text and calls."""
    message = turn.message
    output: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if reasoning:
        output.append(
            {
                "type": "reasoning",
                "id": f"rs_{number}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
            }
        )

    if message["content"] or not turn.tool_calls:
        wants_log_probs = "message.output_text.logprobs" in (body.get("include") or ())
        part = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": log_probs(turn, renderer) if wants_log_probs else [],
        }
        output.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        )

    for i, call in enumerate(turn.tool_calls):
        item_id = f"fc_{number}_{i}"
        output.append(
            {"type": "function_call", "id": item_id, "call_id": call["id"], **call["function"]}
        )
    return [item | {"status": status} for item in output]


def lines(answer: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """Stream the answer as numbered events."""
    for i, (kind, fields) in enumerate(_events(answer)):
        event = {"type": f"response.{kind}", "sequence_number": i, **fields}
        yield f"event: response.{kind}\ndata: {json.dumps(event)}\n\n"


def _events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kinds and fields of the events of an answer."""
    started = answer | {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield "created", {"response": started}
    yield "in_progress", {"response": started}
    for index, item in enumerate(answer["output"]):
        yield from _item_events(index, item)
    yield answer["status"], {"response": answer}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    place = {"item_id": item["id"], "output_index": index}
    arguments = item.get("arguments")
    started = item | {"status": "in_progress"}
    if arguments is None:
        started["content"] = []
    else:
        started["arguments"] = ""
    yield "output_item.added", {"output_index": index, "item": started}

    if arguments is not None:
        yield "function_call_arguments.delta", {**place, "delta": arguments}
        done = {**place, "name": item["name"], "arguments": arguments}
        yield "function_call_arguments.done", done

    for part in item.get("content", ()):
        kind = part["type"]
        text = part["text"]
        part_place = place | {"content_index": 0}
        yield "content_part.added", {**part_place, "part": part | {"text": ""}}
        yield f"{kind}.delta", {**part_place, "delta": text, "logprobs": []}
        done = {**part_place, "text": text, "logprobs": part.get("logprobs", [])}
        yield f"{kind}.done", done
        yield "content_part.done", {**part_place, "part": part}

    yield "output_item.done", {"output_index": index, "item": item}
