"""Which recorded conversation a request continues, whatever its client made of the messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openppo.datasets.conversation import read_arguments
from openppo.datasets.templates import Message, text_of

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""


def fingerprints(messages: Sequence[Message], tools: Tools) -> list[int]:
    """Hashes of the tools and of each message, equal where they say the same.

    Reasoning and keys of a client's own do not count, nor how arguments are written. A text may be one string, a list
    of parts, or null.
    """
    said = [list(tools), *map(_said, messages)]
    return [hash(json.dumps(each, sort_keys=True, default=str)) for each in said]


def _said(message: Message) -> list[Any]:
    role, text, calls = message["role"], text_of(message.get("content")), message.get("tool_calls") or []
    named = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    said = [[call_id, name, read_arguments(arguments or "{}")] for call_id, name, arguments in named]
    return [role, text.strip() if role == "assistant" else text, said]
