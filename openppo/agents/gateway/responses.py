"""POST /v1/responses: items to messages, turns to items and their events."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.chat import FINISH, ROLES, log_probs, words
from openppo.agents.gateway.requests import Asked, Refused, read_call, read_list, read_text, read_tools
from openppo.agents.renderer import Renderer
from openppo.agents.session import Turn
from openppo.datasets.templates import Message, shortened

_ECHOED = ("model", "instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> Asked:
    """A request; ``conversation_of`` gives the messages of an earlier response up to its end."""
    before, given, instructions = (body.get(name) for name in ("previous_response_id", "input", "instructions"))
    messages = conversation_of(str(before)) if before else []
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    if not messages:
        raise Refused("input is empty.")
    if instructions:
        messages.insert(0, {"role": "system", "content": read_text(instructions, "instructions")})
    wants_log_probs = "message.output_text.logprobs" in read_list(body.get("include"), "include")
    return Asked(body, messages, read_tools(body.get("tools")), 1, wants_log_probs, bool(instructions))


def _messages(given: object) -> list[Message]:
    """Messages of items; reasoning, text and calls that follow each other are one turn of the model."""
    messages: list[Message] = []

    def turn(begun_by: Sequence[str]) -> Message:
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in begun_by):
            messages.append({"role": "assistant", "content": None})
        return messages[-1]

    for each in read_list(given, "input"):
        item = each if isinstance(each, dict) else {"type": None}
        kind, role = item.get("type", "message"), ROLES.get(str(item.get("role")))
        if kind == "message" and role is not None:
            text = read_text(item.get("content"), f"a message of {role}")
            if role == "assistant":
                turn(begun_by=("content", "tool_calls"))["content"] = text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "reasoning":
            if thoughts := read_text(item.get("content") or item.get("summary"), "reasoning"):
                turn(begun_by=("reasoning_content", "content", "tool_calls"))["reasoning_content"] = thoughts
        elif kind == "function_call":
            turn(begun_by=()).setdefault("tool_calls", []).append(read_call(item, item.get("call_id")))
        elif kind == "function_call_output":
            output = read_text(item.get("output"), "function_call_output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise Refused(f"input: {shortened(each)} is no message, function_call, function_call_output or reasoning.")
    return messages


def whole(asked: Asked, turns: Sequence[Turn], renderer: Renderer, number: str, created: int) -> dict[str, Any]:
    """The answer as one object."""
    [turn], body = turns, asked.body
    status = "completed" if turn.finish_reason in FINISH else "incomplete"
    read, sampled = len(turn.prompt_ids), len(turn.completion.token_ids)
    usage: dict[str, Any] = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    made = {"id": f"resp_{number}", "object": "response", "created_at": created, "status": status, "error": None}
    made["incomplete_details"] = None if status == "completed" else {"reason": "max_output_tokens"}
    made |= {"output": _output(asked, turn, renderer, number, status), "usage": usage, "truncation": "disabled"}
    made |= {"tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto"}
    made |= {"parallel_tool_calls": True, "metadata": body.get("metadata") or {}, "text": {"format": {"type": "text"}}}
    return made | {name: body.get(name) for name in _ECHOED}


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


def lines(answer: dict[str, Any], asked: Asked) -> Iterator[str]:
    """The answer as a stream of numbered events."""
    for i, (kind, event) in enumerate(_events(answer)):
        event = {"type": f"response.{kind}", "sequence_number": i, **event}
        yield f"event: response.{kind}\ndata: {json.dumps(event)}\n\n"


def _events(answer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = answer | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield from ((kind, {"response": begun}) for kind in ("created", "in_progress"))
    for i, item in enumerate(answer["output"]):
        place = {"item_id": item["id"], "output_index": i}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"arguments": ""} if is_call else {"content": []}
        yield "output_item.added", {"output_index": i, "item": item | empty | {"status": "in_progress"}}
        if is_call:
            yield "function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
        for part in item.get("content", ()):
            kind, place = part["type"], place | {"content_index": 0}
            probs: dict[str, Any] = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            no_probs: dict[str, Any] = {name: [] for name in probs}
            yield "content_part.added", {**place, "part": part | {"text": ""} | no_probs}
            for word in words(part["text"]):
                yield f"{kind}.delta", {**place, "delta": word, **no_probs}
            yield f"{kind}.done", {**place, "text": part["text"], **probs}
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": i, "item": item}
    yield answer["status"], {"response": answer}
