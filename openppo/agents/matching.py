"""Which recorded conversation a request continues, whatever its client made of the messages."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from openppo.datasets.templates import Message, text_of

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


def message_chain(messages: Sequence[Message], tools: Tools) -> list[str]:
    """Hashes of the first 0, 1, 2, ... messages: equal for conversations that say the same.

    Reasoning, ids of calls and keys of a client's own do not count, nor how arguments are written. A text may be one
    string, a list of parts, or null.
    """
    state = sha256(json.dumps(list(tools), sort_keys=True, default=str).encode())
    chain = [state.hexdigest()]
    for message in messages:
        state.update(json.dumps(_said(message), sort_keys=True, default=str).encode())
        chain.append(state.hexdigest())
    return chain


def _said(message: Message) -> list[Any]:
    role, text = message.get("role"), text_of(message.get("content"))
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    said = [[call.get("name"), _same(call.get("arguments"))] for call in calls]
    return ["system" if role == "developer" else role, text.strip() if role == "assistant" else text, said]


def _same(arguments: Any) -> Any:
    """Arguments as one value, however a client writes them."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    return read_arguments(text or "{}", parse_float=_number)


def read_arguments(arguments: Any, **options: Any) -> Any:
    """Arguments of a call as a dict where they are one in JSON; else as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, **options)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float:
    """JavaScript writes 2.0 as 2."""
    value = float(text)
    return int(value) if value.is_integer() else value
