"""POST /v1/chat/completions: requests to messages, turns to completions and their chunks."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openppo.agents.gateway.requests import Asked, Refused, read_call, read_list, read_text, read_tools
from openppo.agents.renderer import Renderer
from openppo.agents.session import Turn
from openppo.datasets.templates import Message, shortened
from openppo.types import FinishReason

FINISH = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}
"""Reasons on the wire; other turns were cut off: ``length``."""
ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def read(body: dict[str, Any], conversation_of: Callable[[str], list[Message]]) -> Asked:
    """A request, which has the whole conversation; ``Refused`` says what is wrong with it."""
    messages = [_message(message) for message in read_list(body.get("messages"), "messages")]
    if not messages:
        raise Refused("messages is empty.")
    return Asked(body, messages, read_tools(body.get("tools")), body.get("n") or 1, bool(body.get("logprobs")))


def _message(given: object) -> Message:
    message = given if isinstance(given, dict) else {}
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise Refused(f"messages: the role of {shortened(given)} is none of {', '.join(ROLES)}.")
    made: Message = {"role": role, "content": read_text(message.get("content"), f"a message of {role}")}
    made |= {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
    if calls := read_list(message.get("tool_calls"), "tool_calls"):
        objects = [call if isinstance(call, dict) else {} for call in calls]
        made["tool_calls"] = [read_call(call.get("function"), call.get("id")) for call in objects]
        made["content"] = made["content"] or None
    return made


def whole(asked: Asked, turns: Sequence[Turn], renderer: Renderer, number: str, created: int) -> dict[str, Any]:
    """The answer as one object."""
    choices = [
        {
            "index": i,
            "message": {"refusal": None, **turn.message},
            "logprobs": {"content": log_probs(turn, asked, renderer), "refusal": None} if asked.log_probs else None,
            "finish_reason": FINISH.get(turn.finish_reason, "length"),
        }
        for i, turn in enumerate(turns)
    ]
    kind = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": created}
    read, sampled = len(turns[0].prompt_ids), sum(len(turn.completion.token_ids) for turn in turns)
    usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
    return {**kind, "model": asked.body.get("model"), "choices": choices, "usage": usage}


def lines(answer: dict[str, Any], asked: Asked) -> Iterator[str]:
    """The answer as a stream."""
    yield from (f"data: {json.dumps(chunk)}\n\n" for chunk in _chunks(answer, asked))
    yield "data: [DONE]\n\n"


def _chunks(answer: dict[str, Any], asked: Asked) -> Iterator[dict[str, Any]]:
    """For each choice its role, text word by word, calls, and the reason of its end; usage if it was asked for."""
    wants_usage = bool((asked.body.get("stream_options") or {}).get("include_usage"))
    head = answer | {"object": "chat.completion.chunk", "usage": None}
    if not wants_usage:
        del head["usage"]
    for choice in answer["choices"]:
        message, ending = choice["message"], {name: choice[name] for name in ("logprobs", "finish_reason")}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if message["content"] is None else ""}]
        deltas += [{name: w} for name in ("reasoning_content", "content") for w in words(message.get(name) or "")]
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", ()))]
        for delta in (*deltas, {}):
            ends = ending if not delta else dict.fromkeys(ending)
            yield head | {"choices": [{"index": choice["index"], "delta": delta, **ends}]}
    if wants_usage:
        yield head | {"choices": [], "usage": answer["usage"]}


def words(text: str) -> list[str]:
    """``text`` in pieces, each a word with the blanks after it."""
    return re.findall(r"\s*\S+\s*|\s+", text)


def log_probs(turn: Turn, asked: Asked, renderer: Renderer) -> list[dict[str, Any]]:
    """Log-probs of all sampled tokens, that of the end among them; of alternatives none are known."""
    made = []
    for token_id, log_prob in zip(turn.completion.token_ids, turn.completion.log_probs, strict=True):
        text = renderer.decode([token_id])
        token = {"token": text, "logprob": log_prob, "bytes": None if "\ufffd" in text else list(text.encode())}
        made.append(token | {"top_logprobs": [token] if asked.body.get("top_logprobs") else []})
    return made
