"""POST /v1/responses: items to messages, turns to items and their events."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.chat import FINISH, log_probs
from openppo.agents.gateway.requests import ROLES, Refused, as_text, read_call, read_content
from openppo.agents.renderer import Renderer
from openppo.agents.turn import Turn
from openppo.datasets.templates import Message, shortened


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> list[Message]:
    """Messages of a request; ``conversation_of`` gives those of an earlier response up to its end."""
    given = body["input"]
    before = body.get("previous_response_id")
    instructions = body.get("instructions")
    messages = conversation_of(before) if before else []
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _messages(items: Iterable[dict[str, Any]]) -> list[Message]:
    """Messages of items; reasoning, text and calls that follow each other are one turn of the model."""
    messages: list[Message] = []
    for item in items:
        kind, last = item.get("type", "message"), messages[-1] if messages else {}
        made: Message
        if kind == "message":
            made = {"role": ROLES[item["role"]], "content": read_content(item["content"])}
        elif kind == "reasoning":
            made = {
                "role": "assistant",
                "reasoning_content": read_content(item.get("content") or item.get("summary")),
            }
        elif kind == "function_call":
            made = {
                "role": "assistant",
                "tool_calls": [*last.get("tool_calls", ()), read_call(item, item["call_id"])],
            }
        elif kind == "function_call_output":
            made = {
                "role": "tool",
                "tool_call_id": as_text(item["call_id"]),
                "content": read_content(item["output"]),
            }
        else:
            raise Refused(
                f"input: {shortened(item)} is no message, function_call, function_call_output or reasoning."
            )
        continues = kind == "function_call" or not (last.get("content") or last.get("tool_calls"))
        if continues and made["role"] == last.get("role") == "assistant":
            last |= made
        else:
            messages.append({"content": None, **made})
    return messages


def whole(
    body: dict[str, Any], turns: Sequence[Turn], renderer: Renderer, number: str, created: int
) -> dict[str, Any]:
    """The answer as one object."""
    turn = turns[0]
    status = "completed" if turn.finish_reason in FINISH else "incomplete"
    read, sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
    usage: dict[str, Any] = {
        "input_tokens": read,
        "output_tokens": sampled,
        "total_tokens": read + sampled,
    }
    usage |= {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    made = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": created,
        "model": body.get("model"),
    }
    made |= {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto"}
    made |= {
        "parallel_tool_calls": True,
        "output": _output(body, turn, renderer, number=number, status=status),
        "usage": usage,
    }
    incomplete = None if status == "completed" else {"reason": "max_output_tokens"}
    return {**made, "status": status, "error": None, "incomplete_details": incomplete}


def _output(
    body: dict[str, Any], turn: Turn, renderer: Renderer, number: str, status: str
) -> list[dict[str, Any]]:
    message = turn.message
    output: list[dict[str, Any]] = []
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        output.append(
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}
        )
    if message["content"] or not turn.tool_calls:
        wants_log_probs = "message.output_text.logprobs" in (body.get("include") or ())
        probs = log_probs(turn, renderer) if wants_log_probs else []
        part = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
            "logprobs": probs,
        }
        output.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
        )
    for i, call in enumerate(turn.tool_calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{i}",
                "call_id": call["id"],
                **call["function"],
            }
        )
    return [item | {"status": status} for item in output]


def lines(answer: dict[str, Any], body: dict[str, Any]) -> Iterator[str]:
    """The answer as a stream of numbered events."""
    for i, (kind, event) in enumerate(_events(answer)):
        event = {"type": f"response.{kind}", "sequence_number": i, **event}
        yield f"event: response.{kind}\ndata: {json.dumps(event)}\n\n"


def _events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = answer | {
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    yield from ((kind, {"response": begun}) for kind in ("created", "in_progress"))
    for i, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": i}
        empty: dict[str, Any] = {"arguments": ""} if "arguments" in item else {"content": []}
        yield (
            "output_item.added",
            {"output_index": i, "item": item | empty | {"status": "in_progress"}},
        )
        if "arguments" in item:
            yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield (
                "function_call_arguments.done",
                {**place, "name": item["name"], "arguments": item["arguments"]},
            )
        for part in item.get("content", ()):
            kind, place = part["type"], place | {"content_index": 0}
            yield "content_part.added", {**place, "part": part | {"text": ""}}
            yield f"{kind}.delta", {**place, "delta": part["text"], "logprobs": []}
            yield (
                f"{kind}.done",
                {**place, "text": part["text"], "logprobs": part.get("logprobs", [])},
            )
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": i, "item": item}
    yield answer["status"], {"response": answer}
